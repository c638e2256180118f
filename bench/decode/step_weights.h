// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "bench/decode/model_shape.h"
#include "bench/kernels/device_memory.h"
#include "kernels/tile.h"

namespace crumb::bench {

// A model's parameters on the device: normal deviates; products are scaled by 1 / sqrt(inputs), so
// that activations stay near 1.
struct StepWeights {
  explicit StepWeights(const ModelShape& model);

  const ModelShape model;
  const size_t qkv_stride, out_stride, gate_up_stride, down_stride;  // elements of one layer
  Device<kernels::Bf16> qkv;         // [layers, qkv_outputs, hidden]
  Device<kernels::Bf16> out;         // [layers, hidden, q_heads * 128]
  Device<kernels::Bf16> gate_up;     // [dense layers, 2 ffn, hidden]
  Device<kernels::Bf16> down;        // [dense layers, hidden, ffn]
  Device<kernels::Bf16> routers;     // [expert layers, experts, hidden]
  Device<uint8_t> experts;           // [expert layers, routed and shared] of expert_bytes
  Device<kernels::Bf16> norms;       // [2 layers + 1, hidden]
  Device<kernels::Bf16> head_norms;  // [layers, 2, 128] of q and k
  Device<kernels::Bf16> table;       // [vocabulary, hidden]
  Device<kernels::Bf16> last;        // [vocabulary, hidden]; null: the table

  const kernels::Bf16* last_projection() const { return last ? last.get() : table.get(); }
};

}  // namespace crumb::bench
