// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace crumb::server {

// Seconds that a function takes.
template <typename Function>
double SecondsOf(const Function& function) {
  const auto started = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// REQUIRES: `seconds` is not empty.
inline double P99(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() * 99 / 100];
}

}  // namespace crumb::server
