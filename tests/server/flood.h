// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace crumb::server {

// Calls without end from several threads, while the round lasts, so that as many calls as threads
// are on their way at any time.
class Flood {
 public:
  Flood(int threads, const std::function<void()>& call) {
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this, call] {
        while (!stop_.load()) call();
      });
    }
  }
  ~Flood() {
    stop_.store(true);
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

inline constexpr int kFloodThreads = 4;

}  // namespace crumb::server
