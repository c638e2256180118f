// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "crumb/sequence.h"
#include "models/kv_cache.h"

namespace crumb::tiny_lm {

// SequenceCache stores the engine's keys and values in a Crumb sequence, which is borrowed.
class SequenceCache : public models::KvCache {
 public:
  explicit SequenceCache(client::Sequence& sequence) : sequence_(sequence) {}

  int length() const override { return sequence_.length(); }
  absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                      const kernels::Bf16* v) override {
    return sequence_.Append(layer, tokens, k, v);
  }
  absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) override {
    return sequence_.Attend(layer, tokens, q, out);
  }
  absl::Status Advance(std::span<const int32_t> tokens) override {
    return sequence_.Advance(tokens);
  }

 private:
  client::Sequence& sequence_;
};

}  // namespace crumb::tiny_lm
