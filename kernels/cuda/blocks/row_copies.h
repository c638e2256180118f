// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/blocks/blocks_call.h"

// The functions of MoveBlockRows for one row, for host and device.
namespace crumb::kernels::cuda {

// The K row of a KV head in blocks; V lies behind it.
CRUMB_HOST_DEVICE inline std::byte* BlockRow(const MoveBlockRowsParams& p, std::byte* base,
                                             const int32_t* ids, int row, int head) {
  const int per_block = p.geometry.rows_per_block;
  return base + p.block_stride * ids[row / per_block] + int64_t{head} * p.geometry.tile_bytes +
         int64_t{row % per_block} * 4 * p.head_dim;
}

CRUMB_HOST_DEVICE inline std::byte* RowInBlocks(const MoveBlockRowsParams& p, int r, int position,
                                                int head) {
  return position < kBlockTokens
             ? BlockRow(p, p.sink_blocks, p.sink.blocks + p.sink.stride * r, position, head)
             : BlockRow(p, p.recent_blocks, p.recent.blocks + p.recent.stride * r,
                        p.geometry.recent_row(position), head);
}

// A row, K or V, that is copied; from is null if there is none.
struct BlockRowCopy {
  std::byte* to;
  const std::byte* from;
};

CRUMB_HOST_DEVICE inline const std::byte* FreshRow(const MoveBlockRowsParams& p,
                                                   const BlockRequest& request, int position,
                                                   int head, bool value) {
  const int64_t token = request.first + position - request.begin;
  const Bf16* const rows = value ? p.v + token * p.v_stride : p.k + token * p.k_stride;
  return reinterpret_cast<const std::byte*>(rows + int64_t{head} * p.head_dim);
}

// Returns copy `index` of request r: of slots in kGather, of fresh tokens otherwise.
CRUMB_HOST_DEVICE inline BlockRowCopy RowCopy(const MoveBlockRowsParams& p,
                                              const BlockRequest& request, int r, int index,
                                              int head, bool value) {
  const int64_t v_in_block = value ? 2 * p.head_dim : 0;
  if (p.move == BlockMove::kGather) {
    const bool sink = index < kBlockTokens;
    const int position = sink ? index : request.rows_begin + index - kBlockTokens;
    if (position >= request.end) return {nullptr, nullptr};
    const int64_t row = (int64_t{value ? p.kv_heads : 0} + head) * p.slots + request.slot + index;
    std::byte* const to = p.rows + row * 2 * p.head_dim;
    if (position >= request.begin) return {to, FreshRow(p, request, position, head, value)};
    return {to, RowInBlocks(p, r, position, head) + v_in_block};
  }
  const int position = request.begin + index;
  if (position >= request.end) return {nullptr, nullptr};
  const bool sink = position < kBlockTokens;
  const bool recent = position >= request.end - p.geometry.recent_capacity();
  const bool stored =
      sink ? p.move != BlockMove::kStoreRecent : p.move != BlockMove::kStoreSink && recent;
  if (!stored) return {nullptr, nullptr};
  return {RowInBlocks(p, r, position, head) + v_in_block,
          FreshRow(p, request, position, head, value)};
}

// Returns the copies of a request that a launch has to look at.
CRUMB_HOST_DEVICE inline int RowCopies(const MoveBlockRowsParams& p) {
  return p.move == BlockMove::kGather ? RequestSlots(p.geometry) + p.request_tokens_max
                                      : p.request_tokens_max;
}

}  // namespace crumb::kernels::cuda
