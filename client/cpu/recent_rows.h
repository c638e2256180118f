// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/worker/page_pool.h"
#include "kernels/tile.h"

namespace crumb::client {

// RecentRows holds BF16 keys and values of the latest tokens of one sequence, for all layers, in
// one ring per (layer, KV head): the row of position p lies in slot p % capacity. Not thread-safe,
// except that different layers may be written and read at once.
//
// In the prompt the ring has room for a prefill block and the window in front of it, afterwards for
// recent_tokens + 64 + draft_slots rows; Resize moves the rows that are still needed.
class RecentRows {
 public:
  RecentRows(int layers, int kv_heads, int head_dim);

  // Makes room for `tokens` positions (rounded up to whole pages) and keeps the rows of positions
  // [begin, end). kResourceExhausted: there is no memory, and nothing has changed.
  absl::Status Resize(int tokens, int begin, int end);

  // Returns a copy with the rows of positions [begin, end).
  absl::StatusOr<RecentRows> Copy(int begin, int end) const;

  // Stores the rows of positions [position, position + tokens) of one layer.
  // k, v [tokens, kv_heads, head_dim]
  void Write(int layer, int position, int tokens, const kernels::Bf16* k, const kernels::Bf16* v);

  int capacity() const { return capacity_; }
  // Returns the ring's slot of a position. REQUIRES: capacity() > 0.
  int slot(int position) const { return position % capacity_; }
  // Returns the bytes of one token's keys and values in all layers.
  size_t bytes_per_token() const { return size_t{2} * row_bytes_ * layers_ * kv_heads_; }

  // The keys and values of one layer, [kv_heads, capacity, head_dim] each.
  const kernels::Bf16* k(int layer) const { return Part(layer, 0); }
  const kernels::Bf16* v(int layer) const { return Part(layer, 1); }
  int64_t head_stride() const { return int64_t{capacity_} * head_dim_; }  // elements
  int64_t token_stride() const { return head_dim_; }

 private:
  kernels::Bf16* Part(int layer, int part) const;
  size_t PartBytes(int capacity) const { return row_bytes_ * capacity * kv_heads_; }
  // Copies the rows of positions [begin, end) to new rings of `capacity` slots.
  absl::Status CopyRows(int capacity, int begin, int end, AlignedBytes* out) const;

  int layers_;
  int kv_heads_;
  int head_dim_;
  size_t row_bytes_;
  int capacity_ = 0;
  AlignedBytes bytes_;  // [layers, K and V, kv_heads, capacity, head_dim]
};

}  // namespace crumb::client
