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

// Publish selects the pages of a sequence that other workers may use.
enum class Publish { kAll, kPrompt, kNone };

// SequenceOptions are the choices of one request. The defaults publish everything and wait as long
// as the worker's begin_deadline.
struct SequenceOptions {
  // extra[i] is a digest of everything else that page i depends on: a cache salt (page 0), or
  // images behind placeholder tokens. Pages behind the end depend on tokens only.
  std::vector<Digest> extra;
  Publish publish = Publish::kAll;
  // Maximum time for which Begin waits for cached pages; pages that are late are computed instead.
  // Absent: WorkerOptions::begin_deadline. Zero: pages of this worker and of host memory only.
  std::optional<Duration> deadline;
  // Maximum number of leading prompt tokens taken from the cache, rounded down to pages. Absent: no
  // maximum.
  std::optional<int> cached_tokens_max;
};

// SequenceStats has the effect of the cache on one sequence so far.
//
// Counts are of tokens, and the hit_tokens_* fields sum to cached_tokens(). The reason of a miss is
// that of MissReasonName.
struct SequenceStats {
  int prompt_tokens = 0;
  // Tokens of pages of a live sequence of this worker.
  int hit_tokens_worker = 0;
  // Tokens of pages leased from crumbd, by the tier in which they were found.
  int hit_tokens_device = 0;
  int hit_tokens_host = 0;
  int hit_tokens_ssd = 0;
  int hit_tokens_remote = 0;
  std::string miss_reason;  // why the first page that could have been a hit is not; empty: none

  uint64_t fetched_bytes = 0;  // tiles leased from crumbd
  // fetched tiles that were copied to a device; the rest is attended in place
  uint64_t loaded_bytes = 0;
  uint64_t stored_bytes = 0;     // tiles of pages made by this sequence
  uint64_t held_bytes = 0;       // present size of all keys and values: pages and BF16 rows
  uint64_t held_bytes_bf16 = 0;  // size of the same tokens in BF16

  int hit_tokens() const {
    return hit_tokens_worker + hit_tokens_device + hit_tokens_host + hit_tokens_ssd +
           hit_tokens_remote;
  }
  // Average number of bits per key or value element, including scales and BF16 windows.
  double bits_per_element() const {
    return held_bytes_bf16 == 0
               ? 16.0
               : 16.0 * static_cast<double>(held_bytes) / static_cast<double>(held_bytes_bf16);
  }
};

// Sequence holds keys and values of one request in three segments: the first 64 tokens in BF16
// (sink), pages of 64 tokens in their stored format (history), and the last 256 to 319 tokens in
// BF16 (recent window). Worker::Begin creates it; it must not outlive the worker. Used by one
// thread at a time.
//
// A forward pass over n fresh tokens calls, for every layer, Append and then Attend, and Advance
// once at the end. The prompt may come in passes of any length, but no pass crosses its end. A pass
// after the prompt has at most 1 + draft_slots tokens. No result depends on how the prompt was cut.
//
// In the prompt a token attends the tokens of its own prefill block in BF16, and the tokens in
// front of the block (or in front of the end of the hit) in their stored format. After the prompt
// it attends the three segments.
//
// Ownership: rows that a caller passes are copied, and `out` is written before Attend returns.
// Complete pages are shared with other sequences of the worker that have the same prefix and are
// freed when the last of them ends. Fetched pages are attended in crumbd's memory under a lease,
// which stays mapped if crumbd dies; a page of several fragments is copied to private memory.
//
// Costs: no call sends a request to crumbd or waits for it. After the prompt, one pass in 64 also
// quantizes the oldest 64 recent tokens, layer by layer inside Append.
class Sequence {
 public:
  virtual ~Sequence() = default;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Number of tokens held, which is the position of the next one. It starts at cached_tokens().
  virtual int length() const = 0;

  // Number of leading prompt tokens whose keys and values came from the cache, a multiple of 64.
  // The engine computes the rest, which is at least one token.
  virtual int cached_tokens() const = 0;

  // Stores the fresh tokens' rows of one layer: k and v are [tokens, kv_heads, head_dim] in BF16,
  // after QK-norm and RoPE, and are copied. kInvalidArgument: the layer or the tokens are out of
  // range, or other layers of the pass had another number of tokens; kFailedPrecondition: the layer
  // has its rows already, or Finish was called; kResourceExhausted: there is no memory for pages.
  // No row is stored after an error. The first Append of a pass allocates everything that the pass
  // needs, so that kResourceExhausted comes before the pass has begun: it can be repeated once
  // other sequences have ended.
  virtual absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                              const kernels::Bf16* v) = 0;

  // Computes causal attention of the pass's fresh tokens over everything held, themselves included:
  // q is [tokens, q_heads, head_dim] in BF16, out is [tokens, q_heads, head_dim] in float, in the
  // model's basis. kFailedPrecondition: there was no Append of this layer before;
  // kResourceExhausted: there is no work memory.
  virtual absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) = 0;

  // Ends the pass: the first tokens.size() fresh tokens become part of the sequence with these ids,
  // the others (rejected drafts, or an abandoned pass) are dropped. kInvalidArgument: more tokens
  // than were fresh, or ids that differ from the prompt; kFailedPrecondition: a layer has no rows.
  // These errors leave the pass as it was. kResourceExhausted: the pass has ended and its tokens
  // count, but there was no memory for a page that is due; its rows stay in BF16 until a later call
  // finds memory. An empty `tokens` abandons the pass, also after an error of Append or Attend.
  virtual absl::Status Advance(std::span<const int32_t> tokens) = 0;

  // Returns another sequence that continues from here; pages are common to both, windows are
  // copied. Between passes only (kFailedPrecondition). The fork has the same prompt, options and
  // stats. kResourceExhausted: there is no memory for the copies.
  virtual absl::StatusOr<std::unique_ptr<Sequence>> Fork() const = 0;

  // Publishes every full page, including those in the recent window, and releases the sequence's
  // memory. Does not wait for the publishing. Without Finish, pages still in the window are lost.
  // Abandons a pass under way. Afterwards stats() and length() keep their values, and all other
  // calls return kFailedPrecondition. kResourceExhausted: the sequence has ended all the same, and
  // pages for which there was no memory are lost.
  virtual absl::Status Finish() = 0;

  virtual SequenceStats stats() const = 0;

 protected:
  Sequence() = default;
};

}  // namespace crumb::client
