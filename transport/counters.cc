// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/counters.h"

namespace crumb::transport {

TransportStats Counters::Snapshot() const {
  TransportStats stats;
  stats.fetches = fetches.value();
  stats.fetches_refused = fetches_refused.value();
  stats.bytes_fetched = bytes_fetched.value();
  stats.fetches_in_flight = fetches_in_flight;
  stats.quarantine_bytes = quarantine_bytes;
  stats.quarantined = quarantined.value();
  stats.serves = serves.value();
  stats.serves_refused = serves_refused.value();
  stats.bytes_served = bytes_served.value();
  stats.serves_in_flight = serves_in_flight;
  stats.serve_bytes_in_flight = serve_bytes_in_flight;
  stats.refusal_bytes = refusal_bytes;
  stats.unread_closes = unread_closes.value();
  stats.connections = connections;
  stats.connections_opened = connections_opened.value();
  stats.connections_failed = connections_failed.value();
  stats.connections_refused = connections_refused.value();
  stats.version_mismatches = version_mismatches.value();
  stats.frames_refused = frames_refused.value();
  stats.frames_stale = frames_stale.value();
  stats.forced_closes = forced_closes.value();
  for (size_t i = 0; i < stats.pages_fetched.size(); ++i) {
    stats.pages_fetched[i] = pages_fetched[i].value();
    stats.pages_served[i] = pages_served[i].value();
  }
  return stats;
}

}  // namespace crumb::transport
