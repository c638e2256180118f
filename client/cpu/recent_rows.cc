// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/cpu/recent_rows.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "common/page_key.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

}  // namespace

RecentRows::RecentRows(int layers, int kv_heads, int head_dim)
    : layers_(layers),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      row_bytes_(sizeof(Bf16) * head_dim) {}

Bf16* RecentRows::Part(int layer, int part) const {
  return reinterpret_cast<Bf16*>(bytes_.get() + (size_t{2} * layer + part) * PartBytes(capacity_));
}

absl::Status RecentRows::CopyRows(int capacity, int begin, int end, AlignedBytes* out) const {
  const size_t size = size_t{2} * layers_ * PartBytes(capacity);
  AlignedBytes bytes = AllocateAligned(size);
  if (bytes == nullptr) {
    return absl::ResourceExhaustedError("no memory for " + std::to_string(size) +
                                        " bytes of recent keys and values");
  }
  const int rings = 2 * layers_ * kv_heads_;
  for (int ring = 0; ring < rings; ++ring) {
    const std::byte* from = bytes_.get() + row_bytes_ * capacity_ * ring;
    std::byte* to = bytes.get() + row_bytes_ * capacity * ring;
    for (int p = begin; p < end; ++p) {
      std::memcpy(to + row_bytes_ * (p % capacity), from + row_bytes_ * (p % capacity_),
                  row_bytes_);
    }
  }
  *out = std::move(bytes);
  return absl::OkStatus();
}

absl::Status RecentRows::Resize(int tokens, int begin, int end) {
  const int capacity = (tokens + kPageTokens - 1) / kPageTokens * kPageTokens;
  if (capacity == capacity_) return absl::OkStatus();
  AlignedBytes bytes;
  CRUMB_RETURN_IF_ERROR(CopyRows(capacity, begin, end, &bytes));
  bytes_ = std::move(bytes);
  capacity_ = capacity;
  return absl::OkStatus();
}

absl::StatusOr<RecentRows> RecentRows::Copy(int begin, int end) const {
  RecentRows copy(layers_, kv_heads_, head_dim_);
  if (capacity_ > 0) CRUMB_RETURN_IF_ERROR(CopyRows(capacity_, begin, end, &copy.bytes_));
  copy.capacity_ = capacity_;
  return copy;
}

void RecentRows::Write(int layer, int position, int tokens, const Bf16* k, const Bf16* v) {
  for (int part = 0; part < 2; ++part) {
    const Bf16* from = part == 0 ? k : v;
    for (int head = 0; head < kv_heads_; ++head) {
      Bf16* ring = Part(layer, part) + head * head_stride();
      for (int t = 0; t < tokens; ++t) {
        std::memcpy(ring + int64_t{slot(position + t)} * head_dim_,
                    from + (int64_t{t} * kv_heads_ + head) * head_dim_, row_bytes_);
      }
    }
  }
}

}  // namespace crumb::client
