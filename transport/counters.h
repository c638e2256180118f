// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "common/metrics.h"
#include "transport/transport.h"

namespace crumb::transport {

// The counters and gauges of a transport, of which TransportStats is a snapshot. Thread-safe.
//
// Requester, Responder and Protocol add to them on the progress thread; any thread may take a
// snapshot, whose values may be some events apart. docs/metrics.md has the names under which crumbd
// exports them.
struct Counters {
  Counter fetches, fetches_refused, bytes_fetched, quarantined;
  Counter serves, serves_refused, bytes_served;
  Counter connections_opened, connections_failed, connections_refused;
  Counter version_mismatches, frames_refused, frames_stale, forced_closes, unread_closes;
  std::array<Counter, kPageStatusCount> pages_fetched, pages_served;
  std::atomic<uint64_t> fetches_in_flight{0}, quarantine_bytes{0};
  std::atomic<uint64_t> serves_in_flight{0}, serve_bytes_in_flight{0}, connections{0};
  std::atomic<uint64_t> refusal_bytes{0};

  TransportStats Snapshot() const {
    TransportStats stats{
        .fetches = fetches.value(),
        .fetches_refused = fetches_refused.value(),
        .bytes_fetched = bytes_fetched.value(),
        .fetches_in_flight = fetches_in_flight,
        .quarantine_bytes = quarantine_bytes,
        .quarantined = quarantined.value(),
        .serves = serves.value(),
        .serves_refused = serves_refused.value(),
        .bytes_served = bytes_served.value(),
        .serves_in_flight = serves_in_flight,
        .serve_bytes_in_flight = serve_bytes_in_flight,
        .refusal_bytes = refusal_bytes,
        .unread_closes = unread_closes.value(),
        .connections = connections,
        .connections_opened = connections_opened.value(),
        .connections_failed = connections_failed.value(),
        .connections_refused = connections_refused.value(),
        .version_mismatches = version_mismatches.value(),
        .frames_refused = frames_refused.value(),
        .frames_stale = frames_stale.value(),
        .forced_closes = forced_closes.value(),
    };
    for (size_t i = 0; i < stats.pages_fetched.size(); ++i) {
      stats.pages_fetched[i] = pages_fetched[i].value();
      stats.pages_served[i] = pages_served[i].value();
    }
    return stats;
  }
};

}  // namespace crumb::transport
