// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Attend of GpuBlockAttention; gpu_block_attention.cc has the other functions.
#include <algorithm>

#include "client/gpu/gpu_block_attention.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {

namespace cuda = kernels::cuda;

using cuda::BlockMove;

absl::Status GpuBlockAttention::CheckRows(int layer, const BlockPool& pool,
                                          const FreshRows& rows) const {
  if (shape_.requests == 0) return absl::FailedPreconditionError("Attend without Prepare");
  if (layer < 0 || layer >= options_.own_layers()) {
    return absl::InvalidArgumentError(fmt::format("layer {} of {}", layer, options_.own_layers()));
  }
  CRUMB_RETURN_IF_ERROR(Check(pool, batch_, shape_));
  const int64_t adjacent = int64_t{options_.own_q_heads()} * options_.head_dim;
  if (rows.q_stride != adjacent || rows.out_stride != adjacent) {
    return absl::InvalidArgumentError("tokens of q and of out must be adjacent");
  }
  uint64_t bits = static_cast<uint64_t>(rows.k_stride | rows.v_stride) * sizeof(kernels::Bf16);
  for (const void* at : {static_cast<const void*>(rows.q), static_cast<const void*>(rows.k),
                         static_cast<const void*>(rows.v), static_cast<const void*>(rows.out)}) {
    if (at == nullptr) return absl::InvalidArgumentError("rows are null");
    bits |= reinterpret_cast<uint64_t>(at);
  }
  if (bits % 16 != 0) return absl::InvalidArgumentError("rows must begin at multiples of 16 bytes");
  return absl::OkStatus();
}

absl::Status GpuBlockAttention::Move(BlockMove move, const BlockPool& pool, const FreshRows& rows,
                                     DeviceStream stream) const {
  cuda::MoveBlockRowsParams params;
  params.move = move;
  params.geometry = geometry_;
  params.request = tables_.requests;
  params.requests = shape_.requests;
  params.request_tokens_max = shape_.tokens_max;
  params.kv_heads = options_.own_kv_heads();
  params.head_dim = options_.head_dim;
  params.sink = batch_.sink;
  params.recent = batch_.recent;
  params.sink_blocks = pool.sink;
  params.recent_blocks = pool.recent;
  params.block_stride = pool.block_stride;
  params.k = rows.k;
  params.v = rows.v;
  params.k_stride = rows.k_stride;
  params.v_stride = rows.v_stride;
  params.rows = reinterpret_cast<std::byte*>(row_memory_.get());
  params.slots = slots();
  params.out = rows.out;
  params.out_stride = rows.out_stride;
  params.out_elements = int64_t{options_.own_q_heads()} * options_.head_dim;
  return device_.kernels().MoveBlockRows(params, stream);
}

// Makes the tiles of the windows that are complete with this step.
absl::Status GpuBlockAttention::Evict(int layer, const BlockPool& pool, DeviceStream stream) const {
  const int heads = options_.own_kv_heads(), dim = options_.head_dim;
  const int blocks = options_.rotations.position_blocks();
  const auto of_layer = [&](cuda::EvictTransform transform) {
    const auto add = [&](const auto* base, size_t bytes) {
      using Pointer = decltype(base);
      if (base == nullptr) return base;
      return reinterpret_cast<Pointer>(reinterpret_cast<const std::byte*>(base) +
                                       bytes * heads * layer);
    };
    transform.rotation = add(transform.rotation, device_.kernels().RotationBytes(dim));
    transform.mean = add(transform.mean, sizeof(float) * blocks * dim);
    transform.feedback = add(transform.feedback, device_.kernels().FeedbackBytes(dim));
    return transform;
  };
  cuda::EvictParams params;
  params.tile = options_.tile_shape();
  params.method = options_.method;
  params.kv_heads = heads;
  params.windows_max = cuda::BlockWindows(shape_.tokens, shape_.requests);
  params.windows = tables_.windows;
  params.ring_address = tables_.window_address;
  params.ring_begin = zeros_;
  params.ring_capacity = kPageTokens;
  params.ring_head_stride = row_bytes() * slots();
  params.ring_token_stride = row_bytes();
  params.ring_v_offset = v_offset();
  params.tile_address = tables_.tile_address;
  // The tables have offsets of blocks, which hold for every layer's pool.
  params.tile_base = reinterpret_cast<uint64_t>(pool.history);
  params.tile_head_stride = geometry_.tile_bytes;
  params.k = of_layer(constants_->evict_k());
  params.v = of_layer(constants_->evict_v());
  params.position_block = tables_.position_block;
  params.position_blocks = blocks;
  params.rarely_any = shape_.decodes_only();
  return device_.kernels().Evict(params, stream);
}

absl::StatusOr<const float*> GpuBlockAttention::Offsets(int layer, const FreshRows& rows,
                                                        DeviceStream stream) const {
  const float* const mean = constants_->mean_k_columns(layer);
  if (mean == nullptr) return nullptr;
  cuda::QueryOffsetsParams params;
  params.tokens = shape_.tokens;
  params.kv_heads = options_.own_kv_heads();
  params.q_heads = options_.own_q_heads();
  params.head_dim = options_.head_dim;
  params.position_blocks = options_.rotations.position_blocks();
  params.q = rows.q;
  params.mean_k = mean;
  params.offset = reinterpret_cast<float*>(offset_memory_.get());
  CRUMB_RETURN_IF_ERROR(device_.kernels().QueryOffsets(params, stream));
  return params.offset;
}

void GpuBlockAttention::SetInputs(int layer, const BlockPool& pool, const FreshRows& rows,
                                  const float* offsets, int first_entry,
                                  cuda::AttentionInputs* params) const {
  params->q = rows.q;
  params->out = rows.out;
  params->page_address = tables_.page_address + int64_t{limits_.pages} * first_entry;
  params->page_layer_offset = reinterpret_cast<int64_t>(pool.history);
  params->page_head_stride = geometry_.tile_bytes;
  params->sink = {.address = tables_.sink_address + first_entry,
                  .layer_offset = 0,
                  .head_stride = row_bytes() * slots(),
                  .token_stride = row_bytes(),
                  .v_offset = v_offset()};
  params->recent = params->sink;
  params->recent.address = tables_.recent_address + first_entry;
  params->recent_capacity = static_cast<int>(slots());  // rows are adjacent and never wrap
  params->rotation_k = constants_->dual_k(layer);
  params->rotation_v = constants_->dual_v(layer);
  params->mean_v = constants_->mean_v(layer);
  params->offset = offsets;
  params->position_blocks = options_.rotations.position_blocks();
  params->pages_per_position_block = options_.rotations.pages_per_position_block();
  params->shift = constants_->shift(layer);
  params->scale = options_.scale;
  params->soft_cap = options_.soft_cap;
  params->window = options_.own_window(layer);
  params->sink_logit = constants_->sink_logits(layer);
}

absl::Status GpuBlockAttention::Decode(int layer, const BlockPool& pool, const FreshRows& rows,
                                       const float* offsets, DeviceStream stream) const {
  cuda::DecodeAttentionParams params;
  SetInputs(layer, pool, rows, offsets, 0, &params);
  params.shape = size_->shape;
  params.lengths = LengthsOfDecode();
  params.plan = size_->plans.Of(params.window);
  params.workspace = reinterpret_cast<void*>(size_->workspace.get());
  return device_.kernels().Decode(params, stream);
}

absl::Status GpuBlockAttention::Prefill(int layer, const BlockPool& pool, const FreshRows& rows,
                                        const float* offsets, DeviceStream stream) const {
  const int first = size_ == nullptr ? 0 : size_->shape.batch;
  cuda::PrefillAttentionParams params;
  SetInputs(layer, pool, rows, offsets, first, &params);
  params.shape = {.tile = options_.tile_shape(),
                  .batch = groups_,
                  .max_pages = limits_.pages,
                  .fresh_max = std::min(kPageTokens, shape_.tokens_max),
                  .kv_heads = options_.own_kv_heads(),
                  .q_heads = options_.own_q_heads()};
  params.lengths = {.sink_tokens = tables_.sink_tokens + first,
                    .pages = tables_.pages + first,
                    .recent_tokens = tables_.recent_tokens + first,
                    .recent_begin = zeros_,
                    .fresh_tokens = tables_.fresh_tokens + first,
                    .fresh_begin = tables_.fresh_begin + first,
                    .bf16_pages = nullptr,
                    .fresh_row = tables_.fresh_row + first};
  params.k = reinterpret_cast<const void*>(row_memory_.get());
  params.v = reinterpret_cast<const void*>(row_memory_.get() + v_offset());
  params.token_stride = options_.head_dim;
  params.head_stride = int64_t{options_.head_dim} * slots();
  return device_.kernels().Prefill(params, stream);
}

absl::Status GpuBlockAttention::Attend(int layer, const BlockPool& pool, const FreshRows& rows,
                                       DeviceStream stream) {
  CRUMB_RETURN_IF_ERROR(CheckRows(layer, pool, rows));
  // Engines share blocks as soon as their tokens are scheduled: a request may attend the sink and
  // the tiles that another one, anywhere in the step, completes. Rows of the recent blocks are
  // gathered before fresh ones replace them; one fresh token replaces none that is needed.
  if (shape_.decodes_only()) {
    CRUMB_RETURN_IF_ERROR(Move(BlockMove::kStore, pool, rows, stream));
    CRUMB_RETURN_IF_ERROR(Move(BlockMove::kGather, pool, rows, stream));
  } else {
    CRUMB_RETURN_IF_ERROR(Move(BlockMove::kStoreSink, pool, rows, stream));
    CRUMB_RETURN_IF_ERROR(Move(BlockMove::kGather, pool, rows, stream));
    CRUMB_RETURN_IF_ERROR(Move(BlockMove::kStoreRecent, pool, rows, stream));
  }
  CRUMB_RETURN_IF_ERROR(Evict(layer, pool, stream));
  CRUMB_ASSIGN_OR_RETURN(const float* offsets, Offsets(layer, rows, stream));
  if (size_ != nullptr) {
    CRUMB_RETURN_IF_ERROR(Decode(layer, pool, rows, offsets, stream));
  }
  if (groups_ == 0) return absl::OkStatus();
  return Prefill(layer, pool, rows, offsets, stream);
}

}  // namespace crumb::client
