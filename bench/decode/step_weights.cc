// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode/step_weights.h"

#include "bench/kernels/random_data.h"

namespace crumb::bench {
namespace {

Device<kernels::Bf16> Random(size_t count, uint32_t seed) {
  Device<kernels::Bf16> values = Allocate<kernels::Bf16>(count);
  FillBf16(count, seed, values.get());
  return values;
}

size_t ExpertBytes(const ModelShape& m) {
  return static_cast<size_t>(m.expert_layers()) * (m.experts.count + m.experts.shared) *
         m.expert_bytes();
}

}  // namespace

StepWeights::StepWeights(const ModelShape& m)
    : model(m),
      qkv_stride(static_cast<size_t>(m.qkv_outputs()) * m.hidden),
      out_stride(static_cast<size_t>(m.q_heads) * 128 * m.hidden),
      gate_up_stride(static_cast<size_t>(2) * m.ffn * m.hidden),
      down_stride(static_cast<size_t>(m.ffn) * m.hidden),
      qkv(Random(qkv_stride * m.layers, 1)),
      out(Random(out_stride * m.layers, 2)),
      gate_up(Random(gate_up_stride * m.dense_layers(), 3)),
      down(Random(down_stride * m.dense_layers(), 4)),
      routers(Random(static_cast<size_t>(m.expert_layers()) * m.experts.count * m.hidden, 9)),
      experts(Allocate<uint8_t>(ExpertBytes(m))),
      norms(Random(static_cast<size_t>(2 * m.layers + 1) * m.hidden, 5)),
      head_norms(Random(static_cast<size_t>(m.layers) * 2 * 128, 6)),
      table(Random(static_cast<size_t>(m.vocabulary) * m.hidden, 7)) {
  FillBf16(ExpertBytes(m) / sizeof(kernels::Bf16), 10,
           reinterpret_cast<kernels::Bf16*>(experts.get()));
  if (!m.tied) last = Random(static_cast<size_t>(m.vocabulary) * m.hidden, 8);
}

}  // namespace crumb::bench
