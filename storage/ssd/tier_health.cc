// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/tier_health.h"

#include <algorithm>

#include "common/logging.h"

namespace crumb::storage {
namespace {

constexpr Duration kFirstPause = std::chrono::seconds(5);
constexpr Duration kLongestPause = std::chrono::minutes(5);
constexpr int kWriteFailuresMax = 1;
constexpr int kReadFailuresMax = 8;

Duration PauseAfter(int failures) {
  return std::min(kFirstPause * (int64_t{1} << std::clamp(failures - 1, 0, 10)), kLongestPause);
}

}  // namespace

bool TierHealth::IsClosed(const Side& side, int failures_max) const {
  return side.failures >= failures_max && clock_.Now() < side.retry_at;
}

absl::Status TierHealth::Check(Operation operation) const {
  MutexLock lock(&mutex_);
  if (IsClosed(reads_, kReadFailuresMax)) {
    return absl::UnavailableError(name_ + " is off: " + reads_.why);
  }
  if (operation == Operation::kWrite && IsClosed(writes_, kWriteFailuresMax)) {
    return absl::UnavailableError(name_ + " is read-only: " + writes_.why);
  }
  return absl::OkStatus();
}

void TierHealth::Failed(Operation operation, const absl::Status& why) {
  const bool write = operation == Operation::kWrite;
  bool closed;
  {
    MutexLock lock(&mutex_);
    Side& side = write ? writes_ : reads_;
    ++side.failures;
    side.why = std::string(why.message());
    side.retry_at = clock_.Now() + PauseAfter(side.failures);
    closed = side.failures >= (write ? kWriteFailuresMax : kReadFailuresMax);
  }
  if (closed) {
    LogError("{} is {} for now: {}", name_, write ? "read-only" : "off",
             std::string(why.message()));
  }
}

void TierHealth::Succeeded(Operation operation) {
  MutexLock lock(&mutex_);
  Side& side = operation == Operation::kWrite ? writes_ : reads_;
  side.failures = 0;
  side.why.clear();
}

std::string TierHealth::State() const {
  MutexLock lock(&mutex_);
  if (reads_.failures >= kReadFailuresMax) return "off: " + reads_.why;
  if (writes_.failures >= kWriteFailuresMax) return "read-only: " + writes_.why;
  return "active";
}

}  // namespace crumb::storage
