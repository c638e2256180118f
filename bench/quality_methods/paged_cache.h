// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/quality_methods/window_codecs.h"
#include "client/examples/tiny_lm/sequence_cache.h"
#include "common/status_macros.h"
#include "crumb/rotation_set.h"
#include "crumb/worker.h"
#include "kernels/attention.h"
#include "kernels/quantize.h"
#include "models/config.h"
#include "models/kv_cache.h"

namespace crumb::bench {

// The keys and values of one sequence, stored by one method. Not thread-safe.
class MethodCache : public models::KvCache {
 public:
  // Returns another sequence that continues from here. REQUIRES: no pass is in progress.
  virtual absl::StatusOr<std::unique_ptr<MethodCache>> Fork() const = 0;
};

// Computes attention of all KV heads of one layer. All pointers are host pointers.
using AttentionBackend = std::function<absl::Status(const kernels::AttentionParams&)>;

// Calls kernels::Attend on the calling thread.
absl::Status AttendOnCpu(const kernels::AttentionParams& params);

// The properties that all sequences of one method share.
struct PagedCacheOptions {
  models::ModelConfig model;
  int context = 0;        // tokens of a sequence at most
  int prefill_block = 0;  // tokens per block of prefill semantics; 0: decode semantics
  // The storage of history. With codecs, rows in the model's basis are encoded and decoded again:
  // one codec for all, or one for each (layer, KV head), with windows of equal length. Otherwise
  // rows become INT2 page tiles by `method` if `int2` is set, or stay BF16 rows.
  std::vector<std::shared_ptr<const WindowCodec>> codecs;
  bool int2 = false;
  kernels::Method method = kernels::Method::kOscar;
  std::vector<std::shared_ptr<const client::RotationSet::Layer>> layers;
  int position_blocks = 1;
  int pages_per_position_block = 1;
  float clip_k = 0.0f;
  float clip_v = 0.0f;
  AttentionBackend attend = AttendOnCpu;
};

// A sequence with sink 64, history, and recent 256 to 319 in BF16, for codecs and back ends that a
// client::Worker does not have. As in client::Sequence, a window of 64 tokens is evicted when there
// are 320 recent tokens; codecs with longer windows store one when all of its tokens are evicted.
// REQUIRES: a pass does not cross a multiple of 64.
class PagedCache : public MethodCache {
 public:
  // `options` must outlive the cache.
  explicit PagedCache(const PagedCacheOptions& options);

  int length() const override { return length_; }
  // kInvalidArgument: there are more tokens than the context.
  absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                      const kernels::Bf16* v) override;
  absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) override;
  absl::Status Advance(std::span<const int32_t> tokens) override;
  absl::StatusOr<std::unique_ptr<MethodCache>> Fork() const override;

  // Returns the bytes of the window that was stored last, of one (layer, KV head), K and V
  // together; 0 before the first was stored. It has 64 tokens, or as many as the codec's windows.
  size_t window_bytes() const { return window_bytes_; }

 private:
  // Returns the rows of one layer and KV head: keys (part 0) or values (part 1), [context,
  // head_dim].
  kernels::Bf16* Rows(int layer, int part, int head);
  // Returns the first position behind the history that the next pass attends.
  int HistoryEnd() const;
  // Stores the windows of one layer before `history_end` that are not stored yet: by codec
  // (StoreRows) or as tiles (StoreTile).
  void StoreWindows(int layer, int history_end);
  void StoreRows(int layer, int head, int page);
  void StoreTile(int layer, int head, int page);
  int PositionBlock(int page) const;
  // Returns q . mu_k of the query rows, [tokens, q_heads, blocks].
  std::vector<float> Offsets(int layer, int tokens, int blocks, const kernels::Bf16* q) const;

  const PagedCacheOptions& options_;
  const kernels::TileShape shape_;
  std::vector<kernels::Bf16> rows_;                // [layers, K and V, kv_heads, context, head_dim]
  std::vector<int> stored_;                        // [layers] stored history pages
  std::vector<std::shared_ptr<uint8_t[]>> tiles_;  // [layers * pages] of all KV heads
  int length_ = 0;
  size_t window_bytes_ = 0;
};

// A sequence of a client::Worker, which must outlive it: the code that serves users.
class WorkerCache : public MethodCache {
 public:
  // Begins a sequence. Tokens of `prompt` are attended like prefill, later ones like decode.
  static absl::StatusOr<std::unique_ptr<MethodCache>> Begin(client::Worker& worker,
                                                            std::span<const int32_t> prompt) {
    client::SequenceOptions alone;
    alone.publish = client::Publish::kNone;
    CRUMB_ASSIGN_OR_RETURN(auto sequence, worker.Begin(prompt, alone));
    return std::unique_ptr<MethodCache>(new WorkerCache(std::move(sequence)));
  }

  int length() const override { return cache_.length(); }
  absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                      const kernels::Bf16* v) override {
    return cache_.Append(layer, tokens, k, v);
  }
  absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) override {
    return cache_.Attend(layer, tokens, q, out);
  }
  absl::Status Advance(std::span<const int32_t> tokens) override { return cache_.Advance(tokens); }
  absl::StatusOr<std::unique_ptr<MethodCache>> Fork() const override {
    CRUMB_ASSIGN_OR_RETURN(auto sequence, sequence_->Fork());
    return std::unique_ptr<MethodCache>(new WorkerCache(std::move(sequence)));
  }

 private:
  explicit WorkerCache(std::unique_ptr<client::Sequence> sequence)
      : sequence_(std::move(sequence)), cache_(*sequence_) {}

  std::unique_ptr<client::Sequence> sequence_;
  tiny_lm::SequenceCache cache_;
};

}  // namespace crumb::bench
