// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device/background.h"

#include <string>
#include <utility>

namespace crumb::client {

Background::~Background() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

void Background::Add(std::function<void()> task) {
  MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
  ++added_;
  if (!std::exchange(started_, true)) thread_ = Thread(name_, [this] { Run(); });
  changed_.NotifyAll();
}

absl::Status Background::WaitIdle(Duration timeout) {
  const TimePoint deadline = Clock::Real().Now() + timeout;
  MutexLock lock(&mutex_);
  const uint64_t target = added_;
  while (done_ < target) {
    if (!changed_.WaitUntil(&mutex_, deadline) && done_ < target) {
      return absl::DeadlineExceededError(std::to_string(target - done_) +
                                         " device tasks are still under way");
    }
  }
  return absl::OkStatus();
}

void Background::Run() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mutex_);
      while (tasks_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
    task = nullptr;  // outside the lock, because the task may free memory
    MutexLock lock(&mutex_);
    ++done_;
    changed_.NotifyAll();
  }
}

}  // namespace crumb::client
