// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

namespace crumb {

// Waits until `condition` holds. False: it did not, `within` that time; long enough for a loaded
// machine, so that only what never comes takes it.
template <typename Condition>
bool Eventually(const Condition& condition,
                std::chrono::steady_clock::duration within = std::chrono::seconds(60)) {
  const auto deadline = std::chrono::steady_clock::now() + within;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return condition();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace crumb
