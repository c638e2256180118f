// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/sha256.h"
#include "kernels/tile.h"

namespace crumb::client {

// Which pages of a sequence other workers may use.
enum class Publish { kAll, kPrompt, kNone };

struct SequenceOptions {
  // Digest of whatever else page i depends on: a cache salt (page 0), images behind placeholder
  // tokens. Pages beyond the end depend on tokens only.
  std::vector<Digest> extra;
  Publish publish = Publish::kAll;
  // How long Begin may wait for cached pages; what is not there by then is computed. Absent:
  // WorkerOptions::begin_deadline; zero: only what this worker and host memory hold.
  std::optional<Duration> deadline;
  // Leading prompt tokens that the cache may supply; absent: all that it has. Rounded down to
  // pages.
  std::optional<int> cached_tokens_max;
};

// What the cache did for one sequence so far.
struct SequenceStats {
  int prompt_tokens = 0;
  int hit_tokens_worker = 0;  // shared with a live sequence of this worker
  int hit_tokens_device = 0;  // leased from crumbd, by the tier they were found in
  int hit_tokens_host = 0;
  int hit_tokens_ssd = 0;
  int hit_tokens_remote = 0;
  std::string miss_reason;  // of the first page that could have hit and did not; empty: none

  uint64_t fetched_bytes = 0;    // tiles leased from crumbd
  uint64_t loaded_bytes = 0;     // of those, copied to a device; the rest is attended in place
  uint64_t stored_bytes = 0;     // tiles of pages made by this sequence
  uint64_t held_bytes = 0;       // what keys and values of all tokens take now: pages and BF16 rows
  uint64_t held_bytes_bf16 = 0;  // what the same tokens would take in BF16

  int hit_tokens() const {
    return hit_tokens_worker + hit_tokens_device + hit_tokens_host + hit_tokens_ssd +
           hit_tokens_remote;
  }
  // Bits that hold one key or value element on average, scales and BF16 windows included.
  double bits_per_element() const {
    return held_bytes_bf16 == 0
               ? 16.0
               : 16.0 * static_cast<double>(held_bytes) / static_cast<double>(held_bytes_bf16);
  }
};

// Keys and values of one request in three segments: the first 64 tokens in BF16 (sink), pages of
// 64 tokens as they are stored (history), the last 256 to 319 tokens in BF16 (recent). Made by
// Worker::Begin, which it must not outlive. Not thread-safe: one thread at a time.
//
// A forward pass over n fresh tokens is, for every layer, Append and then Attend; and Advance once
// at the end. The prompt may come in passes of any length; a pass does not cross its end. A pass
// after the prompt has at most 1 + draft_slots tokens. No result depends on how the prompt was cut.
//
// In the prompt a token attends tokens of its own prefill block in BF16 and those before it (or
// before the end of the hit) as stored; after the prompt it attends the segments above.
class Sequence {
 public:
  virtual ~Sequence() = default;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Tokens held: the position of the next one. Starts at cached_tokens().
  virtual int length() const = 0;

  // Leading prompt tokens whose keys and values came from the cache: the engine computes the rest,
  // which is at least one token. A multiple of 64.
  virtual int cached_tokens() const = 0;

  // Adds the fresh tokens' rows of one layer.
  // k, v [tokens, kv_heads, head_dim] bf16, after QK-norm and RoPE; not kept by reference.
  // kInvalidArgument: layer or tokens out of range, or another number of tokens than the pass's
  // other layers had; kFailedPrecondition: the layer has its rows already, or Finish was called;
  // kResourceExhausted: no memory for pages.
  virtual absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                              const kernels::Bf16* v) = 0;

  // Causal attention of the pass's fresh tokens over everything held, themselves included.
  // q [tokens, q_heads, head_dim] bf16; out [tokens, q_heads, head_dim] f32, the model's basis.
  // kFailedPrecondition: no Append of this layer before.
  virtual absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) = 0;

  // Ends the pass: the first tokens.size() fresh tokens are now part of the sequence under these
  // ids, the others (rejected drafts, or a pass given up) are dropped. kInvalidArgument: more than
  // were fresh, or ids that differ from the prompt; kFailedPrecondition: a layer has no rows.
  virtual absl::Status Advance(std::span<const int32_t> tokens) = 0;

  // Another sequence that continues from here: pages are shared, windows are copied. Between
  // passes only (kFailedPrecondition).
  virtual absl::StatusOr<std::unique_ptr<Sequence>> Fork() const = 0;

  // Publishes every full page, those in the recent window too, and gives up what the sequence
  // holds. Does not wait for the publishing. Without it, pages still in the window are lost.
  virtual absl::Status Finish() = 0;

  virtual SequenceStats stats() const = 0;

 protected:
  Sequence() = default;
};

}  // namespace crumb::client
