// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Append and Attend of GpuBatch; gpu_batch.cc has the other functions.
#include "client/gpu/gpu_batch.h"

#include "common/status_macros.h"

namespace crumb::client {

using kernels::Bf16;
using kernels::PageFormat;

namespace {

kernels::cuda::OutType OutTypeOf(DeviceOutput output) {
  return output == DeviceOutput::kF32 ? kernels::cuda::OutType::kF32
                                      : kernels::cuda::OutType::kBf16;
}

}  // namespace

absl::Status GpuBatch::Append(int layer, const void* k, const void* v) {
  if (prompt()) return AppendPrompt(layer, k, v);
  const DeviceGeometry& g = parts_.geometry;
  kernels::cuda::AppendParams params;
  params.batch = options_.sequences;
  params.q_tokens = options_.tokens;
  params.kv_heads = g.kv_heads;
  params.head_dim = g.head_dim;
  params.k = k;
  params.v = v;
  params.head_stride = g.head_dim;
  params.token_stride = int64_t{1} * g.head_dim * g.kv_heads;
  params.sequence_stride = params.token_stride * options_.tokens;
  params.lengths = tables_->lengths();
  params.sink = g.SinkRows(layer, tables_->sinks(0));
  params.recent = parts_.decode_ring.Rows(layer, tables_->rings(0));
  params.recent_capacity = parts_.decode_ring.capacity;
  return parts_.device.kernels().Append(params, options_.stream);
}

// Launches once per sequence, because chunks differ in length.
absl::Status GpuBatch::AppendPrompt(int layer, const void* k, const void* v) {
  const DeviceGeometry& g = parts_.geometry;
  kernels::cuda::AppendParams params;
  params.kv_heads = g.kv_heads;
  params.head_dim = g.head_dim;
  params.head_stride = g.head_dim;
  params.token_stride = int64_t{1} * g.head_dim * g.kv_heads;
  params.recent_capacity = parts_.prompt_ring.capacity;
  int64_t before = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int place = static_cast<int>(i);
    params.q_tokens = entries_[i]->fresh;
    params.k = static_cast<const Bf16*>(k) + before * params.token_stride;
    params.v = static_cast<const Bf16*>(v) + before * params.token_stride;
    params.lengths = tables_->lengths_after(place);
    params.sink = g.SinkRows(layer, tables_->sinks(place));
    params.recent = parts_.prompt_ring.Rows(layer, tables_->rings(place));
    CRUMB_RETURN_IF_ERROR(parts_.device.kernels().Append(params, options_.stream));
    before += entries_[i]->fresh;
  }
  prompt_k_ = k;
  prompt_v_ = v;
  return absl::OkStatus();
}

absl::StatusOr<const float*> GpuBatch::Offsets(int layer, const void* q) {
  const float* mean = parts_.constants.mean_k_columns(layer);
  if (mean == nullptr) return nullptr;
  kernels::cuda::QueryOffsetsParams params;
  params.tokens = prompt() ? fresh_ : options_.sequences * options_.tokens;
  params.kv_heads = parts_.geometry.kv_heads;
  params.q_heads = parts_.geometry.q_heads;
  params.head_dim = parts_.geometry.head_dim;
  params.position_blocks = parts_.options.rotations.position_blocks();
  params.q = static_cast<const Bf16*>(q);
  params.mean_k = mean;
  params.offset = reinterpret_cast<float*>(offsets_.get());
  if (held_.get() != 0) {
    params.held_head = tables_->held_heads();
    params.held_tokens = options_.tokens;
    params.held = reinterpret_cast<Bf16*>(held_.get() +
                                          parts_.watch->token_bytes() * options_.tokens * layer);
  }
  CRUMB_RETURN_IF_ERROR(parts_.device.kernels().QueryOffsets(params, options_.stream));
  return params.offset;
}

absl::Status GpuBatch::Attend(int layer, const void* q, void* out) {
  if (prompt()) return AttendPrompt(layer, q, out);
  CRUMB_ASSIGN_OR_RETURN(const float* offsets, Offsets(layer, q));
  kernels::cuda::DecodeAttentionParams params;
  SetInputs(layer, offsets, &params);
  params.shape = DecodeShape();
  params.lengths = tables_->lengths();
  params.q = q;
  params.out = out;
  params.plan = plans_.Of(params.window);
  params.workspace = reinterpret_cast<void*>(workspace_.get());
  return parts_.device.kernels().Decode(params, options_.stream);
}

void GpuBatch::SetInputs(int layer, const float* offsets,
                         kernels::cuda::AttentionInputs* params) const {
  const DeviceGeometry& g = parts_.geometry;
  const RingShape& ring = prompt() ? parts_.prompt_ring : parts_.decode_ring;
  params->out_type = OutTypeOf(options_.output);
  params->page_address = tables_->page_table();
  params->page_layer_offset = layer * static_cast<int64_t>(g.layer_stride(PageFormat::kInt2));
  params->page_head_stride = static_cast<int64_t>(g.tile.int2_bytes());
  params->sink = g.SinkRows(layer, tables_->sinks(0));
  params->recent = ring.Rows(layer, tables_->rings(0));
  params->recent_capacity = ring.capacity;
  params->rotation_k = parts_.constants.dual_k(layer);
  params->rotation_v = parts_.constants.dual_v(layer);
  params->mean_v = parts_.constants.mean_v(layer);
  params->offset = offsets;
  params->position_blocks = parts_.options.rotations.position_blocks();
  params->pages_per_position_block = parts_.options.rotations.pages_per_position_block();
  params->shift = parts_.constants.shift(layer);
  params->scale = parts_.options.scale;
  params->soft_cap = parts_.options.soft_cap;
  params->window = parts_.options.own_window(layer);
  params->sink_logit = parts_.constants.sink_logits(layer);
}

absl::Status GpuBatch::AttendPrompt(int layer, const void* q, void* out) {
  for (const GpuSequence* sequence : entries_) {
    for (const auto& load : sequence->loads) {
      CRUMB_RETURN_IF_ERROR(load->MakeWait(options_.stream, layer));
    }
  }
  CRUMB_RETURN_IF_ERROR(HoldQueries(layer, q));
  CRUMB_ASSIGN_OR_RETURN(const float* offsets, Offsets(layer, q));
  const DeviceGeometry& g = parts_.geometry;
  kernels::cuda::PrefillAttentionParams params;
  SetInputs(layer, offsets, &params);
  params.shape = PrefillShape();
  params.lengths = tables_->prefill_lengths();
  params.q = q;
  params.out = out;
  params.k = prompt_k_;
  params.v = prompt_v_;
  params.token_stride = int64_t{1} * g.head_dim * g.kv_heads;
  params.head_stride = g.head_dim;
  return parts_.device.kernels().Prefill(params, options_.stream);
}

}  // namespace crumb::client
