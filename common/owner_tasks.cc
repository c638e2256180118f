// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/owner_tasks.h"

#include <pthread.h>

#include <deque>
#include <thread>
#include <unordered_map>
#include <utility>

#include "common/logging.h"
#include "common/mutex.h"

namespace crumb {

// Outlives the object when a thread does not come back from a task.
struct OwnerTasks::State {
  explicit State(const Options& wanted) : options(wanted) {}

  struct Owner {
    std::deque<std::function<void()>> tasks;  // the first may be in progress
    bool served = false;                      // a thread runs its tasks, or it waits in `ready`
  };

  void Enqueue(const std::shared_ptr<State>& self, const std::string& name,
               std::function<void()> task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Owner& owner = owners[name];
    owner.tasks.push_back(std::move(task));
    if (owner.served) return;
    owner.served = true;
    ready.push_back(name);
    // Idle threads that were woken before may not have taken their owner yet.
    if (idle >= ready.size()) return wake.NotifyOne();
    if (threads >= options.owners_max) return;
    ++threads;
    // Detached: the destructor waits for `threads` instead, and not for ever.
    std::thread([self] {
      ::pthread_setname_np(::pthread_self(), self->options.name.substr(0, 15).c_str());
      self->Run();
    }).detach();
  }

  void Run() {
    MutexLock lock(&mutex);
    while (true) {
      while (ready.empty() && !stopping && idle == 0) {
        ++idle;
        wake.Wait(&mutex);
        --idle;
      }
      if (ready.empty() || abandoned) break;
      const std::string name = std::move(ready.front());
      ready.pop_front();
      Serve(name);
      if (abandoned) break;
    }
    --threads;
    ended.NotifyAll();
  }

  void Serve(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const auto found = owners.find(name);
    while (!found->second.tasks.empty() && !abandoned) {
      std::function<void()> task = std::move(found->second.tasks.front());
      mutex.Unlock();
      task();
      task = nullptr;  // what it holds may block as well
      mutex.Lock();
      found->second.tasks.pop_front();
    }
    if (found->second.tasks.empty()) owners.erase(found);
  }

  const Options options;
  Mutex mutex;
  CondVar wake;
  CondVar ended;
  std::unordered_map<std::string, Owner> owners ABSL_GUARDED_BY(mutex);
  std::deque<std::string> ready ABSL_GUARDED_BY(mutex);  // owners that wait for a thread
  size_t idle ABSL_GUARDED_BY(mutex) = 0;
  size_t threads ABSL_GUARDED_BY(mutex) = 0;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool abandoned ABSL_GUARDED_BY(mutex) = false;
};

OwnerTasks::OwnerTasks(const Options& options) : state_(std::make_shared<State>(options)) {}

OwnerTasks::~OwnerTasks() {
  const TimePoint until = Clock::Real().Now() + state_->options.stop_wait;
  MutexLock lock(&state_->mutex);
  state_->stopping = true;
  state_->wake.NotifyAll();
  while (state_->threads > 0) {
    if (state_->ended.WaitUntil(&state_->mutex, until) || state_->threads == 0) continue;
    state_->abandoned = true;
    LogWarning("{}: {} threads are blocked by other processes and are left", state_->options.name,
               state_->threads);
    return;
  }
}

bool OwnerTasks::Submit(const std::string& owner, std::function<void()> task) {
  MutexLock lock(&state_->mutex);
  const auto found = state_->owners.find(owner);
  if (found != state_->owners.end() && found->second.tasks.size() >= state_->options.tasks_max) {
    return false;
  }
  state_->Enqueue(state_, owner, std::move(task));
  return true;
}

void OwnerTasks::Destroy(const std::string& owner, std::shared_ptr<const void> object) {
  if (object == nullptr) return;
  MutexLock lock(&state_->mutex);
  state_->Enqueue(state_, owner, [object = std::move(object)]() mutable { object.reset(); });
}

size_t OwnerTasks::pending(const std::string& owner) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->owners.find(owner);
  return found == state_->owners.end() ? 0 : found->second.tasks.size();
}

}  // namespace crumb
