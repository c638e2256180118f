// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/fetch.h"
#include "transport/fragment_source.h"
#include "transport/transport_options.h"
#include "transport/transport_stats.h"

namespace crumb::transport {

// Memory that the transport's devices can reach without a copy, until it is destroyed. Optional:
// fetches and serves work on any memory. Destroy before the transport, and not while a fetch or a
// send uses it.
class RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
};

// Moves fragments between crumbds: fetches from peers, serves them from a FragmentSource. Connects
// to a peer at Connect or the first fetch, keeps the connection, and connects again, with growing
// pauses, after it failed. One progress thread; when nothing is under way it sleeps. Thread-safe.
class Transport {
 public:
  virtual ~Transport() = default;  // as Stop

  // Where peers reach this one, ADDRESS:PORT with the port that was bound; empty: nowhere.
  virtual std::string address() const = 0;

  // Fetches from the peer at `address` (numeric ADDRESS:PORT). `done` is called once if, and only
  // if, the result is OK, possibly before Fetch returns when called from a `done`. Never blocks.
  // kInvalidArgument: the request is malformed, or a wish overflows; kResourceExhausted:
  // fetches_max are under way; kFailedPrecondition: stopped.
  virtual absl::StatusOr<FetchId> Fetch(const std::string& address, FetchRequest request,
                                        FetchDone done) = 0;

  // Ends the wait for a fetch: its pages that have not arrived are kCancelled. Does nothing if it
  // has ended.
  virtual void Cancel(FetchId fetch) = 0;

  // Connects to a peer that fetches are expected from, unless there is a connection or a pause
  // after a failed one. Never blocks; what becomes of it is seen by the next fetch.
  virtual void Connect(const std::string& address) = 0;

  // Closes the connections to a peer that left; fetches from it end as kUnavailable. A later Fetch
  // connects anew, at once.
  virtual void Disconnect(const std::string& address) = 0;

  // Registers a slab. Blocks for the time that pinning takes. kResourceExhausted: the system's
  // limit of locked memory.
  virtual absl::StatusOr<std::unique_ptr<RegisteredMemory>> Register(
      std::span<std::byte> memory) = 0;

  virtual TransportStats stats() const = 0;

  // "ucx 1.13.1, tcp on lo": for the log at start and build_info.
  virtual std::string Describe() const = 0;

  // Ends all fetches as kUnavailable, closes all connections, joins the progress thread. After it,
  // nothing refers to the source, to leases, or to memory of fetches. Idempotent.
  virtual void Stop() = 0;
};

}  // namespace crumb::transport
