// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "common/mutex.h"

namespace crumb::server {

// Returns whether a call that ended with `status` got a response from the other node, an error
// included. kUnavailable, kDeadlineExceeded and kCancelled are silence.
bool IsResponse(const absl::Status& status);

// Keeps requests from waiting for a node that does not respond: after some failures in a row no
// request is sent to it for a while, then one, whose success closes the breaker again. Calls and
// bytes are counted apart, since every fetch follows a call: a node that responds and does not
// deliver counts as silent, too. Each Peer has one. Thread-safe.
//
//   kClosed --failures in a row--> kOpen --open_for, next Allow--> kHalfOpen --Succeed--> kClosed
//                                    ^                                |
//                                    '-------------- Fail ------------'
class Breaker {
 public:
  enum class State : uint8_t { kClosed, kOpen, kHalfOpen };
  enum class Of : uint8_t { kCalls, kBytes };
  // cluster.breaker_failures and cluster.breaker_open.
  struct Options {
    int64_t failures = 5;
    Duration open_for = std::chrono::seconds(2);
  };

  Breaker(const Options& options, const Clock& clock) : options_(options), clock_(clock) {}

  // Returns whether a request may be sent to the node now. True must be followed by Note, Succeed
  // or Fail. In kHalfOpen one request may be sent per open_for, so a probe whose end is never
  // reported blocks nothing for good.
  bool Allow();
  // Counts a call to the node by its status: only silence is a failure.
  void Note(const absl::Status& status);
  // Count a success or a failure of a call or of a fetch of bytes.
  void Succeed(Of what);
  void Fail(Of what);

  // Returns the state as of the last call; kOpen does not end by itself, but with the next Allow.
  State state() const;
  // Returns how often the breaker has opened.
  uint64_t opened() const { return opened_.value(); }

 private:
  const Options options_;
  const Clock& clock_;
  Counter opened_;
  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kClosed;
  // Consecutive failures, indexed by Of.
  std::array<int64_t, 2> failures_ ABSL_GUARDED_BY(mutex_) = {};
  TimePoint until_ ABSL_GUARDED_BY(mutex_);  // end of kOpen, and of the probe of kHalfOpen
};

// Returns "closed", "open" or "half-open".
const char* BreakerStateName(Breaker::State state);

}  // namespace crumb::server
