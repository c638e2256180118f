// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace crumb::client {

// QualitySample has the errors that quantization caused in one layer of one evicted window, as
// ratios of Euclidean norms; 0 is exact.
//
// The reference is attention over the exact BF16 rows of the same 64 tokens, so that the sample
// measures the quantizer alone and errors are not hidden by the rest of the context.
struct QualitySample {
  int layer = 0;
  // error of attention over the window's 64 tokens, for recent queries
  float attention_error = 0.0f;
  float key_error = 0.0f;    // error of the window's keys
  float value_error = 0.0f;  // error of the window's values
};

// SessionCounters are amounts to add to crumbd's counters of the same names, and samples for its
// histograms.
//
// They are increments: the client adds them up and sends the sum once per
// ClientOptions::counters_interval, over the session stream. Amounts that were being sent when a
// connection broke may be lost.
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

// WorkerCounters count the events of a worker since it was opened.
//
// They distinguish a cache that does not help from one that is not used: prompt_tokens is the sum
// over all requests, hit_tokens_* the tokens that were not computed, by the place of the page, and
// the remaining counters say why the others were. Each dropped page is counted in exactly one
// publish_dropped_* counter. Values of one result may be some events apart.
struct WorkerCounters {
  uint64_t sequences = 0;
  uint64_t prompt_tokens = 0;
  uint64_t prompt_tokens_known = 0;  // prompt tokens whose page keys came from the prompt key cache
  uint64_t hit_tokens_worker = 0;    // hits in pages of this worker's live sequences
  // hits in pages leased from crumbd, by the tier in which they were found
  uint64_t hit_tokens_device = 0;
  uint64_t hit_tokens_host = 0;
  uint64_t hit_tokens_ssd = 0;
  uint64_t hit_tokens_remote = 0;
  // fetched fragments whose header or checksums differ, which are misses
  uint64_t verify_failures = 0;
  // pages in device memory whose checksums were verified again in place
  uint64_t pages_scrubbed = 0;
  // pages of prefixes that were not scrubbed because too many were queued
  uint64_t scrubs_dropped = 0;
  uint64_t deadline_exceeded = 0;  // hits given up because crumbd responded too late
  uint64_t unavailable = 0;        // hits given up because crumbd was absent or refused

  uint64_t windows_evicted = 0;  // windows of BF16 rows that became pages
  // evicted windows with a non-finite key or value, which are never published
  uint64_t windows_refused = 0;
  uint64_t windows_saturated = 0;  // evicted windows in which a scale or minimum was clamped
  uint64_t windows_measured = 0;   // evicted windows that the quality watch measured
  uint64_t quality_alarms = 0;     // times the quality watch found the mean error above the bound

  uint64_t pool_pages = 0;  // pages made visible in device pools, evicted or loaded by this worker
  uint64_t published_pages = 0;        // pages that crumbd stored in its own memory
  uint64_t deduplicated_pages = 0;     // pages that crumbd had already
  uint64_t publish_refused = 0;        // pages that crumbd refused
  uint64_t publish_dropped_queue = 0;  // pages dropped because the queue was full
  uint64_t publish_dropped_room = 0;  // pages dropped because staging memory or every tier was full
  // pages dropped because crumbd was absent or did not respond in time
  uint64_t publish_dropped_unavailable = 0;
  uint64_t published_bytes = 0;  // tiles and headers of published_pages
};

}  // namespace crumb::client
