// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/executor.h"

#include <utility>

namespace crumb {

Executor::Executor(const Options& options) : options_(options) {
  for (int i = 0; i < options_.threads; ++i) {
    threads_.emplace_back(options_.name + std::to_string(i), [this] { Run(); });
  }
}

Executor::~Executor() { Stop(); }

bool Executor::Submit(std::function<void()> task) {
  {
    MutexLock lock(&mutex_);
    if (!stopping_ && tasks_.size() < options_.queue_max) {
      tasks_.push_back(std::move(task));
      wake_.NotifyOne();
      return true;
    }
  }
  refused_.Add();
  return false;
}

void Executor::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  for (Thread& thread : threads_) thread.Join();
}

size_t Executor::queued() const {
  MutexLock lock(&mutex_);
  return tasks_.size();
}

void Executor::Run() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mutex_);
      while (tasks_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace crumb
