// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

namespace crumb::bench {

// Seconds that all threads of this process and of `others` (process ids) have run, in user and
// kernel mode. Other processes are counted in ticks of 10 ms; ones that are gone count 0.
double CpuSeconds(std::span<const int> others);

}  // namespace crumb::bench
