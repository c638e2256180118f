// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "common/metrics.h"
#include "transport/transport_stats.h"

namespace crumb::transport {

// What TransportStats is a snapshot of. Thread-safe.
struct Counters {
  Counter fetches, fetches_refused, bytes_fetched, quarantined;
  Counter serves, serves_refused, bytes_served;
  Counter connections_opened, connections_failed, connections_refused;
  Counter version_mismatches, frames_refused, frames_stale, forced_closes, unread_closes;
  std::array<Counter, kPageStatusCount> pages_fetched, pages_served;
  std::atomic<uint64_t> fetches_in_flight{0}, quarantine_bytes{0};
  std::atomic<uint64_t> serves_in_flight{0}, serve_bytes_in_flight{0}, connections{0};
  std::atomic<uint64_t> refusal_bytes{0};

  TransportStats Snapshot() const;
};

}  // namespace crumb::transport
