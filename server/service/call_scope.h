// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>

#include "absl/status/status.h"
#include "common/clock.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Calls in progress, and how many of the kinds that have a bound of their own. Thread-safe.
struct CallsInProgress {
  std::atomic<int64_t> all{0};
  std::atomic<int64_t> gets{0};
  std::atomic<int64_t> puts{0};
};

// One call from its arrival to its end: bounded, counted and timed.
class CallScope {
 public:
  CallScope(const CallContext& context, CallsInProgress& calls, Rpc rpc)
      : context_(context), calls_(calls), rpc_(rpc), started_(context.clock.Now()) {
    calls_.all.fetch_add(1);
    context_.metrics.requests.Begin();
  }
  CallScope(const CallScope&) = delete;
  ~CallScope() {
    calls_.all.fetch_sub(1);
    context_.metrics.requests.End();
    context_.metrics.requests.Observe(rpc_, code_, SecondsBetween(started_, context_.clock.Now()));
  }

  // kResourceExhausted when there are more calls than the bound allows.
  absl::Status Admit() const {
    if (calls_.all.load() <= context_.limits.requests_max) return absl::OkStatus();
    context_.metrics.Reject(Rejection::kRequests);
    return absl::ResourceExhaustedError("limits.requests_max is reached, try again");
  }

  // What the call ended with.
  void SetCode(absl::StatusCode code) { code_ = code; }

 private:
  const CallContext& context_;
  CallsInProgress& calls_;
  const Rpc rpc_;
  const TimePoint started_;
  absl::StatusCode code_ = absl::StatusCode::kOk;
};

// Holds one place of `count`; taken() is false when `most` are held already.
class Place {
 public:
  Place(std::atomic<int64_t>& count, int64_t most)
      : count_(count), taken_(count.fetch_add(1) < most) {}
  Place(const Place&) = delete;
  ~Place() { count_.fetch_sub(1); }
  bool taken() const { return taken_; }

 private:
  std::atomic<int64_t>& count_;
  const bool taken_;
};

}  // namespace crumb::server
