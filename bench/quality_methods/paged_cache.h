// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "bench/quality_methods/method_cache.h"
#include "bench/quality_methods/window_codec.h"
#include "crumb/rotation_set.h"
#include "kernels/attention.h"
#include "kernels/quantize.h"
#include "models/config.h"

namespace crumb::bench {

// Computes all KV heads of one layer. All pointers are host pointers.
using AttentionBackend = std::function<absl::Status(const kernels::AttentionParams&)>;

// kernels::Attend on the calling thread.
absl::Status AttendOnCpu(const kernels::AttentionParams& params);

// What every sequence of one method shares.
struct PagedCacheOptions {
  models::ModelConfig model;
  int context = 0;        // tokens at most
  int prefill_block = 0;  // above 0: prefill semantics with blocks of so many tokens; 0: decode
  // What history becomes. With a codec: rows in the model's basis, through its bytes and back.
  // Without: INT2 page tiles by `method`, or, where that is not set either, BF16 rows as they are.
  std::shared_ptr<const WindowCodec> codec;
  bool int2 = false;
  kernels::Method method = kernels::Method::kOscar;
  std::vector<std::shared_ptr<const client::RotationSet::Layer>> layers;
  int position_blocks = 1;
  int pages_per_position_block = 1;
  float clip_k = 0.0f;
  float clip_v = 0.0f;
  AttentionBackend attend = AttendOnCpu;
};

// Sink 64, history, recent 256 to 319 in BF16, for codecs and back ends that a client::Worker does
// not have. Windows of 64 leave when 320 recent tokens are there, as client::Sequence has it. A
// pass starts at a multiple of 64 and ends before the next one behind it, or continues inside.
class PagedCache : public MethodCache {
 public:
  // `options` must outlive the cache.
  explicit PagedCache(const PagedCacheOptions& options);

  int length() const override { return length_; }
  // kInvalidArgument: more tokens than the context.
  absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                      const kernels::Bf16* v) override;
  absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) override;
  absl::Status Advance(std::span<const int32_t> tokens) override;
  absl::StatusOr<std::unique_ptr<MethodCache>> Fork() const override;

  // Bytes that one window of 64 tokens of one (layer, KV head) takes, K and V together; 0 before
  // one was stored.
  size_t window_bytes() const { return window_bytes_; }

 private:
  kernels::Bf16* Rows(int layer, int part, int head);
  int HistoryEnd() const;
  void StoreWindows(int layer, int history_end);
  void StoreRows(int layer, int head, int page);
  void StoreTile(int layer, int head, int page);
  int PositionBlock(int page) const;
  std::vector<float> Offsets(int layer, int tokens, int blocks, const kernels::Bf16* q) const;

  const PagedCacheOptions& options_;
  const kernels::TileShape shape_;
  std::vector<kernels::Bf16> rows_;                // [layers, K and V, kv_heads, context, head_dim]
  std::vector<int> stored_;                        // [layers] history pages stored
  std::vector<std::shared_ptr<uint8_t[]>> tiles_;  // [layers * pages] of all KV heads
  int length_ = 0;
  size_t window_bytes_ = 0;
};

}  // namespace crumb::bench
