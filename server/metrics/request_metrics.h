// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "common/metrics.h"

namespace crumb::server {

// The calls of both gRPC services, as metrics count them. Calls over sessions' own sockets count as
// the call that they make.
enum class Rpc : uint8_t {
  kOpenKeyspace,
  kSetKeyspaceState,
  kAcquire,
  kLookup,
  kRelease,
  kReserve,
  kCommit,
  kAbort,
  kFlush,
  kGet,
  kPut,
  kPrefetch,
  kPin,
  kUnpin,
  kDelete,
  kDropKeyspace,
  kWatchEvents,
  kStats,
  kListNodes,
  kSession,
  kLocatePage,
  kDrainNode,
  kPeerHello,
  kPeerAcquire,
  kPeerRelease,
  kPeerPush,
  kPeerRead,
  kPeerKeyspaces,
  kPeerDrain,
  kClaimSlots,
  kScrubSlots,
};
inline constexpr int kRpcCount = 31;
// Returns the value of the metrics' label `rpc`.
const char* RpcName(Rpc rpc);

// How a call ended, in as few kinds as an operator acts upon.
enum class Outcome : uint8_t {
  kOk,
  kCallerError,  // INVALID_ARGUMENT, NOT_FOUND, UNAUTHENTICATED, FAILED_PRECONDITION, CANCELLED
  kRejected,     // RESOURCE_EXHAUSTED, UNAVAILABLE
  kDeadline,
  kError,
};
inline constexpr int kOutcomeCount = 5;
// Returns the value of the metrics' label `outcome`.
const char* OutcomeName(Outcome outcome);
// Returns the kind that a status belongs to; codes that no other kind lists are kError.
Outcome OutcomeOf(absl::StatusCode code);

// Durations of calls by RPC and outcome. Thread-safe.
class RequestMetrics {
 public:
  RequestMetrics();

  // Counts a call that took `seconds` and ended with `code`.
  void Observe(Rpc rpc, absl::StatusCode code, double seconds);
  // Counts a call that arrived. End must follow when it is over.
  void Begin() { in_flight_.fetch_add(1, std::memory_order_relaxed); }
  void End() { in_flight_.fetch_sub(1, std::memory_order_relaxed); }
  int64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  const Histogram& of(Rpc rpc, Outcome outcome) const { return histograms_[Index(rpc, outcome)]; }

 private:
  static size_t Index(Rpc rpc, Outcome outcome) {
    return static_cast<size_t>(rpc) * kOutcomeCount + static_cast<size_t>(outcome);
  }
  std::deque<Histogram> histograms_;
  std::atomic<int64_t> in_flight_{0};
};

}  // namespace crumb::server
