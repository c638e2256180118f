// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/cpu_seconds.h"

#include <time.h>

namespace crumb::bench {
namespace {

double Read(clockid_t clock) {
  timespec time{};
  if (::clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

double CpuSecondsOf(std::span<const int> pids) {
  double seconds = 0;
  for (const int pid : pids) {
    clockid_t clock;
    if (::clock_getcpuclockid(pid, &clock) == 0) seconds += Read(clock);
  }
  return seconds;
}

double CpuSeconds(std::span<const int> others) {
  return Read(CLOCK_PROCESS_CPUTIME_ID) + CpuSecondsOf(others);
}

}  // namespace crumb::bench
