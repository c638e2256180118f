// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

#include "transport/fetch.h"

namespace crumb::transport {

// A snapshot. Counters count since the start; docs/metrics.md names their series.
struct TransportStats {
  // Fetching.
  uint64_t fetches = 0;
  uint64_t fetches_refused = 0;                            // over fetches_max
  std::array<uint64_t, kPageStatusCount> pages_fetched{};  // by PageStatus
  uint64_t bytes_fetched = 0;                              // tiles of kHit pages
  uint64_t fetches_in_flight = 0;                          // gauge
  uint64_t quarantine_bytes = 0;                           // gauge
  uint64_t quarantined = 0;                                // fetches whose memory outlived them
  // Serving.
  uint64_t serves = 0;
  uint64_t serves_refused = 0;  // over serves_max or serve_bytes_max
  std::array<uint64_t, kPageStatusCount> pages_served{};
  uint64_t bytes_served = 0;
  uint64_t serves_in_flight = 0;       // gauge
  uint64_t serve_bytes_in_flight = 0;  // gauge
  uint64_t refusal_bytes = 0;          // gauge: memory of busy answers that are not sent yet
  uint64_t unread_closes = 0;          // connections of peers that did not read busy answers
  // Connections.
  uint64_t connections = 0;  // gauge, both ways
  uint64_t connections_opened = 0;
  uint64_t connections_failed = 0;   // did not come up, or broke
  uint64_t connections_refused = 0;  // over connections_max
  uint64_t version_mismatches = 0;
  uint64_t frames_refused = 0;  // malformed, out of order, or of no fetch of that connection
  uint64_t frames_stale = 0;    // of a fetch that has ended
  uint64_t forced_closes = 0;   // to end quarantine
};

}  // namespace crumb::transport
