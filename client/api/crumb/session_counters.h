// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "crumb/quality_sample.h"

namespace crumb::client {

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

}  // namespace crumb::client
