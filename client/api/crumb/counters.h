// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace crumb::client {

// What quantization did to one layer of one evicted window. Ratios of Euclidean norms; 0: exact.
struct QualitySample {
  int layer = 0;
  float attention_error = 0.0f;  // of attention over the window's 64 tokens, for recent queries
  float key_error = 0.0f;        // of the window's keys
  float value_error = 0.0f;      // of its values
};

// Amounts to add to crumbd's counters of the same names, and samples for its histograms.
struct SessionCounters {
  uint64_t used_tokens = 0;
  uint64_t prefill_tokens_avoided = 0;
  uint64_t publish_dropped_pages = 0;
  uint64_t deadline_exceeded = 0;
  uint64_t verify_failures = 0;
  uint64_t windows_refused = 0;
  uint64_t scrubbed_pages = 0;
  std::vector<QualitySample> quality = {};
};

// What a Worker has counted since it was opened.
struct WorkerCounters {
  uint64_t sequences = 0;
  uint64_t prompt_tokens = 0;
  uint64_t prompt_tokens_known = 0;  // of those: as an earlier prompt, not hashed
  uint64_t hit_tokens_worker = 0;    // pages of this worker's live sequences
  uint64_t hit_tokens_device = 0;    // pages leased from crumbd, by the tier they were found in
  uint64_t hit_tokens_host = 0;
  uint64_t hit_tokens_ssd = 0;
  uint64_t hit_tokens_remote = 0;
  uint64_t verify_failures = 0;    // fetched fragments whose header or sums differed: misses
  uint64_t pages_scrubbed = 0;     // pages on a device that were summed again where they lie
  uint64_t scrubs_dropped = 0;     // pages of prefixes that were to be, too many at once
  uint64_t deadline_exceeded = 0;  // hits given up because crumbd answered too late
  uint64_t unavailable = 0;        // hits given up because crumbd was not there or refused

  uint64_t windows_evicted = 0;    // pages made from BF16 rows
  uint64_t windows_refused = 0;    // of those: held a non-finite key or value, never published
  uint64_t windows_saturated = 0;  // of those: a scale or minimum was limited
  uint64_t windows_measured = 0;   // of those: by the quality watch
  uint64_t quality_alarms = 0;     // times the watch found errors above the bound

  uint64_t pool_pages = 0;             // made visible in device pools: evicted here, or loaded
  uint64_t published_pages = 0;        // stored by crumbd in its own memory
  uint64_t deduplicated_pages = 0;     // crumbd had them already
  uint64_t publish_refused = 0;        // crumbd refused them
  uint64_t publish_dropped_queue = 0;  // the queue was full
  uint64_t publish_dropped_room = 0;   // no staging memory or no room in any tier
  uint64_t publish_dropped_unavailable = 0;  // no crumbd, or it did not answer in time
  uint64_t published_bytes = 0;              // tiles and headers of published_pages
};

}  // namespace crumb::client
