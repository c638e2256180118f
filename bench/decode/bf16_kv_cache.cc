// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode/bf16_attention.h"
#include "bench/decode/kv_cache.h"
#include "bench/kernels/device_rates.h"
#include "bench/kernels/random_data.h"

namespace crumb::bench {
namespace {}  // namespace

Bf16KvCache::Bf16KvCache(const ModelShape& model, const SequenceShape& sequence, int batch)
    : model_(model), batch_(batch), tokens_(sequence.tokens()) {
  const size_t sequence_elements =
      static_cast<size_t>(model.layers) * model.kv_heads * 2 * tokens_ * kHeadDim;
  rows_ = Allocate<kernels::Bf16>(sequence_elements * batch);
  FillBf16(sequence_elements * batch, 21, rows_.get());
  std::vector<uint64_t> address;
  for (int s = 0; s < batch; ++s) {
    address.push_back(reinterpret_cast<uint64_t>(rows_.get() + s * sequence_elements));
  }
  address_ = Upload(address);
  begin_ = Upload(std::vector<int32_t>(batch, 0));
  count_ = Upload(std::vector<int32_t>(batch, tokens_));
  workspace_ = Allocate<uint8_t>(Bf16AttentionWorkspaceBytes(batch, model.kv_heads));
}

kernels::cuda::Bf16Rows Bf16KvCache::Rows(int layer) const {
  const int64_t head = int64_t{2} * tokens_ * 2 * kHeadDim;
  return {address_.get(), layer * head * model_.kv_heads, head, 2 * kHeadDim, head / 2};
}

void Bf16KvCache::SetAppend(int layer, models::cuda::RopeParams* p) const {
  p->ring = Rows(layer);
  p->begin = begin_.get();
  p->tokens = count_.get();
  p->capacity = tokens_;
}

void Bf16KvCache::Attend(int layer, const kernels::Bf16* q, kernels::Bf16* out,
                         cudaStream_t stream) const {
  Bf16AttentionParams p;
  p.batch = batch_;
  p.tokens = tokens_;
  p.kv_heads = model_.kv_heads;
  p.q_heads = model_.q_heads;
  p.q = q;
  p.out = out;
  p.rows = Rows(layer);
  p.workspace = workspace_.get();
  Check(Bf16Attention(p, stream), "bf16 attention");
}

}  // namespace crumb::bench
