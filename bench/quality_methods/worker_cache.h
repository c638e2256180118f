// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "bench/quality_methods/method_cache.h"
#include "client/examples/tiny_lm/sequence_cache.h"
#include "common/status_macros.h"
#include "crumb/worker.h"

namespace crumb::bench {

// A sequence of a client::Worker, which must outlive it: what the product does.
class WorkerCache : public MethodCache {
 public:
  // Tokens of `prompt` are attended as prefill, those behind it as decode.
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
