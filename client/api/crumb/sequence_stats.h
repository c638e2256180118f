// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace crumb::client {

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

}  // namespace crumb::client
