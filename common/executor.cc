// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/executor.h"

#include <algorithm>
#include <utility>

namespace crumb {

Executor::Executor(const Options& options)
    : options_(options),
      tenant_threads_max_(options.part_max_percent < 100 ? std::max(1, options.threads - 1)
                                                         : options.threads),
      places_(options.queue_max, options.part_max_percent) {
  for (int i = 0; i < options_.threads; ++i) {
    threads_.emplace_back(options_.name + std::to_string(i), [this] { Run(); });
  }
}

Executor::~Executor() { Stop(); }

bool Executor::Submit(const std::string& tenant, std::function<void()> task) {
  return SubmitSteps(tenant, [task = std::move(task)] {
    task();
    return false;
  });
}

bool Executor::SubmitSteps(const std::string& tenant, Step step) {
  {
    MutexLock lock(&mutex_);
    if (!stopping_ && places_.Take(tenant) == TenantBudget::Taken::kYes) {
      const auto entry = tenants_.try_emplace(tenant).first;
      entry->second.tasks.push_back({std::move(step)});
      ++queued_;
      if (RotateLocked(entry)) wake_.NotifyOne();
      return true;
    }
  }
  refused_.Add();
  return false;
}

bool Executor::RotateLocked(Tenants::iterator tenant) {
  Tenant& state = tenant->second;
  if (state.in_rotation || state.tasks.empty() || state.running >= tenant_threads_max_) {
    return false;
  }
  state.in_rotation = true;
  rotation_.push_back(tenant);
  return true;
}

Executor::Task Executor::TakeLocked(Tenants::iterator* tenant) {
  *tenant = rotation_.front();
  rotation_.pop_front();
  Tenant& state = (*tenant)->second;
  Task task = std::move(state.tasks.front());
  state.tasks.pop_front();
  state.in_rotation = false;
  ++state.running;
  --queued_;
  if (!task.begun) places_.Give((*tenant)->first);
  task.begun = true;
  if (RotateLocked(*tenant)) wake_.NotifyOne();
  return task;
}

void Executor::EndStepLocked(Tenants::iterator tenant, Task task, bool more) {
  --tenant->second.running;
  if (more) {
    tenant->second.tasks.push_front(std::move(task));
    ++queued_;
  }
  RotateLocked(tenant);  // this thread takes a task next
  if (tenant->second.tasks.empty() && tenant->second.running == 0) tenants_.erase(tenant);
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
    Task task;
    Tenants::iterator tenant;
    {
      MutexLock lock(&mutex_);
      while (rotation_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (rotation_.empty()) return;
      task = TakeLocked(&tenant);
    }
    const bool more = task.step();
    if (!more) task.step = nullptr;  // destroys captured objects outside the lock
    MutexLock lock(&mutex_);
    EndStepLocked(tenant, std::move(task), more);
  }
}

}  // namespace crumb
