// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace crumb::storage {

// Whether a tier's device may be used: after a failure not for a while, which doubles with each
// failure in a row up to a bound, then again. Thread-safe.
class TierHealth {
 public:
  enum class Operation { kRead, kWrite };

  // `name` stands in log lines and errors.
  TierHealth(std::string name, const Clock& clock) : name_(std::move(name)), clock_(clock) {}

  // kUnavailable with the reason while `operation` is not to be tried.
  absl::Status Check(Operation operation) const;
  // One failed write makes the tier read-only; reads that fail again and again turn it off.
  void Failed(Operation operation, const absl::Status& why);
  void Succeeded(Operation operation);

  // "active", "read-only: <why>" or "off: <why>".
  std::string State() const;

 private:
  struct Side {
    int failures = 0;  // consecutive failures
    TimePoint retry_at;
    std::string why;
  };

  bool IsClosed(const Side& side, int failures_max) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string name_;
  const Clock& clock_;
  mutable Mutex mutex_;
  Side reads_ ABSL_GUARDED_BY(mutex_);
  Side writes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
