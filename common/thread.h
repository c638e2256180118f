// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <string>
#include <thread>
#include <utility>

namespace crumb {

// A thread with a name (at most 15 characters are kept), joined on destruction. The owner must
// make the body end before.
class Thread {
 public:
  Thread() = default;
  template <typename Body>
  Thread(const std::string& name, Body body)
      : thread_([name = name.substr(0, 15), body = std::move(body)]() mutable {
          ::pthread_setname_np(::pthread_self(), name.c_str());
          body();
        }) {}
  Thread(Thread&&) = default;
  Thread& operator=(Thread&& other) noexcept {
    Join();
    thread_ = std::move(other.thread_);
    return *this;
  }
  ~Thread() { Join(); }

  void Join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace crumb
