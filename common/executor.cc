// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/executor.h"

#include <utility>

namespace crumb {

Executor::Executor(const Options& options)
    : options_(options), places_(options.queue_max, options.part_max_percent) {
  for (int i = 0; i < options_.threads; ++i) {
    threads_.emplace_back(options_.name + std::to_string(i), [this] { Run(); });
  }
}

Executor::~Executor() { Stop(); }

bool Executor::Submit(const std::string& tenant, std::function<void()> task) {
  {
    MutexLock lock(&mutex_);
    if (!stopping_ && places_.Take(tenant) == TenantBudget::Taken::kYes) {
      auto& waiting = tasks_[tenant];
      if (waiting.empty()) rotation_.push_back(tenant);
      waiting.push_back(std::move(task));
      ++queued_;
      wake_.NotifyOne();
      return true;
    }
  }
  refused_.Add();
  return false;
}

std::function<void()> Executor::TakeLocked() {
  const std::string tenant = std::move(rotation_.front());
  rotation_.pop_front();
  const auto found = tasks_.find(tenant);
  std::function<void()> task = std::move(found->second.front());
  found->second.pop_front();
  --queued_;
  places_.Give(tenant);
  if (found->second.empty()) {
    tasks_.erase(found);
  } else {
    rotation_.push_back(tenant);
  }
  return task;
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
  return queued_;
}

void Executor::Run() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mutex_);
      while (queued_ == 0 && !stopping_) wake_.Wait(&mutex_);
      if (queued_ == 0) return;
      task = TakeLocked();
    }
    task();
  }
}

}  // namespace crumb
