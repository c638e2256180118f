// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/fetch.h"
#include "transport/fragment_source.h"
#include "transport/transport_options.h"

namespace crumb::transport {

// A snapshot of a transport's counters, which count since its start, and gauges. docs/metrics.md
// names their series.
struct TransportStats {
  // This node's fetches.
  uint64_t fetches = 0;
  uint64_t fetches_refused = 0;                            // because of fetches_max
  std::array<uint64_t, kPageStatusCount> pages_fetched{};  // indexed by PageStatus
  uint64_t bytes_fetched = 0;                              // tiles of kHit pages
  uint64_t fetches_in_flight = 0;                          // gauge
  uint64_t quarantine_bytes = 0;                           // gauge
  uint64_t quarantined = 0;  // fetches that ended while a transfer could still write
  // Peers' fetches, which this node serves.
  uint64_t serves = 0;
  uint64_t serves_refused = 0;  // because of serves_max or serve_bytes_max
  std::array<uint64_t, kPageStatusCount> pages_served{};
  uint64_t bytes_served = 0;
  uint64_t serves_in_flight = 0;       // gauge
  uint64_t serve_bytes_in_flight = 0;  // gauge
  uint64_t refusal_bytes = 0;          // gauge: memory of kBusy replies that are not sent yet
  uint64_t unread_closes = 0;  // connections closed because the peer did not read kBusy replies
  // Connections.
  uint64_t connections = 0;  // gauge, in both directions
  uint64_t connections_opened = 0;
  uint64_t connections_failed = 0;   // not established, or broken
  uint64_t connections_refused = 0;  // because of connections_max
  uint64_t version_mismatches = 0;
  uint64_t frames_refused = 0;  // malformed, or not allowed in the connection's state
  uint64_t frames_stale = 0;    // belonging to a fetch that has ended
  uint64_t forced_closes = 0;   // closed to bound quarantine and unread serves
};

// Moves fragments between crumbds: it fetches them from peers and serves them from a
// FragmentSource. It connects to a peer at Connect or at the first fetch, keeps the connection, and
// reconnects after a failure with growing pauses. One progress thread does all work and sleeps
// while nothing is in flight. Thread-safe.
class Transport {
 public:
  virtual ~Transport() = default;  // also stops

  // The ADDRESS:PORT at which peers reach this node, with the port that was bound. Empty if it does
  // not listen.
  virtual std::string address() const = 0;

  // Fetches from the peer at `address` (numeric ADDRESS:PORT). `done` is called once if, and only
  // if, the result is OK; if Fetch is called from a `done`, possibly before Fetch returns. Never
  // blocks. kInvalidArgument: the request is malformed or too large; kResourceExhausted:
  // fetches_max fetches are in flight; kFailedPrecondition: the transport was stopped.
  virtual absl::StatusOr<FetchId> Fetch(const std::string& address, FetchRequest request,
                                        FetchDone done) = 0;

  // Ends a fetch: those of its pages that have not arrived are kCancelled. Does nothing if the
  // fetch has ended.
  virtual void Cancel(FetchId fetch) = 0;

  // Connects to a peer from which fetches are expected, unless there is a connection or the pause
  // after a failed one has not passed. Never blocks; the next fetch reports a failure.
  virtual void Connect(const std::string& address) = 0;

  // Closes the connections to a peer that left the cluster; fetches from it end as kUnavailable. A
  // later Fetch connects again without a pause.
  virtual void Disconnect(const std::string& address) = 0;

  virtual TransportStats stats() const = 0;

  // A description for the log at start and the metric build_info, such as "ucx 1.13.1, tcp on lo".
  virtual std::string Describe() const = 0;

  // Ends all fetches as kUnavailable, closes all connections and joins the progress thread.
  // Afterwards the transport refers neither to its source, nor to leases, nor to the memory of
  // fetches. Idempotent.
  virtual void Stop() = 0;
};

}  // namespace crumb::transport
