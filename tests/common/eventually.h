// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

namespace crumb {

// Waits until `condition` holds, busily at first. Returns false if it does not hold `within` that
// time, which is long enough for a loaded machine: only a failing test takes it.
template <typename Condition>
bool Eventually(const Condition& condition,
                std::chrono::steady_clock::duration within = std::chrono::seconds(90)) {
  const auto deadline = std::chrono::steady_clock::now() + within;
  for (int polls = 0; !condition(); ++polls) {
    if (std::chrono::steady_clock::now() > deadline) return condition();
    if (polls < 1000) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return true;
}

}  // namespace crumb
