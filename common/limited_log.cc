// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/limited_log.h"

#include <algorithm>

namespace crumb {

LogLimiter& LogLimiter::Process() {
  static auto* const limiter = new LogLimiter();  // threads may log until the process ends
  return *limiter;
}

bool LogLimiter::Admit(const char* kind, TimePoint now, uint64_t* left_out) {
  MutexLock lock(&mutex_);
  Kind& of_kind = kinds_.try_emplace(kind, Kind{.since = now}).first->second;
  if (const int64_t more = (now - of_kind.since) / kInterval; more > 0) {
    of_kind.lines = std::min(of_kind.lines + more, kBurst);
    of_kind.since += more * kInterval;
  }
  if (of_kind.lines == 0) {
    ++of_kind.left_out;
    ++left_out_;
    return false;
  }
  --of_kind.lines;
  *left_out = std::exchange(of_kind.left_out, 0);
  return true;
}

uint64_t LogLimiter::left_out() const {
  MutexLock lock(&mutex_);
  return left_out_;
}

}  // namespace crumb
