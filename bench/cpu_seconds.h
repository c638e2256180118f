// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

namespace crumb::bench {

// Seconds that all threads of the processes `pids` have run, in user and kernel mode, those that
// have ended among them; of the scheduler's clocks, which count nanoseconds. Processes that are
// gone, or of which this one cannot see the id, count 0.
double CpuSecondsOf(std::span<const int> pids);

// The same of this process and of `others`.
double CpuSeconds(std::span<const int> others);

}  // namespace crumb::bench
