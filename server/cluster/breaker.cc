// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/breaker.h"

#include <algorithm>

namespace crumb::server {

bool Breaker::Allow() {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  if (state_ == State::kClosed) return true;
  if (now < until_) return false;
  // One probe; if its end is never reported, another one follows after the same time.
  state_ = State::kHalfOpen;
  until_ = now + options_.open_for;
  return true;
}

bool IsResponse(const absl::Status& status) {
  return !absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status) &&
         !absl::IsCancelled(status);
}

void Breaker::Note(const absl::Status& status) {
  IsResponse(status) ? Succeed(Of::kCalls) : Fail(Of::kCalls);
}

void Breaker::Succeed(Of what) {
  MutexLock lock(&mutex_);
  failures_[static_cast<size_t>(what)] = 0;
  // A breaker that the other kind of failure opened stays open.
  const int64_t most = *std::max_element(failures_.begin(), failures_.end());
  if (state_ == State::kHalfOpen || most < options_.failures) state_ = State::kClosed;
}

void Breaker::Fail(Of what) {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  const int64_t failures = ++failures_[static_cast<size_t>(what)];
  if (state_ == State::kOpen) return;
  if (state_ == State::kClosed && failures < options_.failures) return;
  state_ = State::kOpen;
  until_ = now + options_.open_for;
  opened_.Add();
}

Breaker::State Breaker::state() const {
  MutexLock lock(&mutex_);
  return state_;
}

const char* BreakerStateName(Breaker::State state) {
  switch (state) {
    case Breaker::State::kClosed:
      return "closed";
    case Breaker::State::kOpen:
      return "open";
    case Breaker::State::kHalfOpen:
      return "half-open";
  }
  return "closed";
}

}  // namespace crumb::server
