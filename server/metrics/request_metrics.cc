// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/request_metrics.h"

namespace crumb::server {

const char* RpcName(Rpc rpc) {
  static constexpr const char* kNames[kRpcCount] = {
      "OpenKeyspace", "SetKeyspaceState", "Acquire",       "Lookup",      "Release",
      "Reserve",      "Commit",           "Abort",         "Flush",       "Get",
      "Put",          "Prefetch",         "Pin",           "Unpin",       "Delete",
      "DropKeyspace", "WatchEvents",      "Stats",         "ListNodes",   "Session",
      "LocatePage",   "DrainNode",        "PeerHello",     "PeerAcquire", "PeerRelease",
      "PeerPush",     "PeerRead",         "PeerKeyspaces", "PeerDrain",   "ClaimSlots",
      "ScrubSlots"};
  return kNames[static_cast<size_t>(rpc)];
}

const char* OutcomeName(Outcome outcome) {
  static constexpr const char* kNames[kOutcomeCount] = {"ok", "caller_error", "rejected",
                                                        "deadline", "error"};
  return kNames[static_cast<size_t>(outcome)];
}

Outcome OutcomeOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return Outcome::kOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kCancelled:
      return Outcome::kCallerError;
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable:
      return Outcome::kRejected;
    case absl::StatusCode::kDeadlineExceeded:
      return Outcome::kDeadline;
    default:
      return Outcome::kError;
  }
}

RequestMetrics::RequestMetrics() {
  for (int i = 0; i < kRpcCount * kOutcomeCount; ++i) histograms_.emplace_back(LatencyBounds());
}

void RequestMetrics::Observe(Rpc rpc, absl::StatusCode code, double seconds) {
  histograms_[Index(rpc, OutcomeOf(code))].Observe(seconds);
}

}  // namespace crumb::server
