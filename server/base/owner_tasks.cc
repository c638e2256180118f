// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/owner_tasks.h"

#include <pthread.h>

#include <deque>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "common/logging.h"
#include "common/mutex.h"

namespace crumb::server {

// Outlives the object when a thread does not come back from a task.
struct OwnerTasks::State {
  explicit State(const Options& wanted) : options(wanted) {}

  struct Task {
    std::function<void()> run;
    size_t descriptors = 0;
  };
  struct Owner {
    std::deque<Task> tasks;  // the first may be in progress
    size_t descriptors = 0;  // sum over its tasks
    bool served = false;     // a thread runs its tasks, or it waits in `ready`
  };

  void Enqueue(const std::shared_ptr<State>& self, const std::string& name, Task task)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Owner& owner = owners[name];
    owner.descriptors += task.descriptors;
    all_descriptors += task.descriptors;
    owner.tasks.push_back(std::move(task));
    if (!owner.served) {
      owner.served = true;
      ready.push_back(name);
    }
    if (!ready.empty()) StartThread(self);
  }

  // Has a thread take the next owner. If the system has no thread now, the next task tries again.
  void StartThread(const std::shared_ptr<State>& self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    // Idle threads that were woken before may not have taken their owner yet.
    if (idle >= ready.size()) return wake.NotifyOne();
    if (threads >= options.owners_max) return;
    try {
      // Detached: the destructor waits for `threads` instead, and not for ever.
      std::thread([self] {
        ::pthread_setname_np(::pthread_self(), self->options.name.substr(0, 15).c_str());
        self->Run();
      }).detach();
      ++threads;
    } catch (const std::system_error& error) {
      LogWarning("{}: no thread can be started: {}", options.name, error.what());
    }
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

  // REQUIRES: the owner is served by this thread alone, so its element stays while the lock is not
  // held, whatever comes and goes beside it.
  void Serve(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Owner& owner = owners.at(name);
    while (!owner.tasks.empty() && !abandoned) {
      std::function<void()> run = std::move(owner.tasks.front().run);
      mutex.Unlock();
      run();
      run = nullptr;  // the destructors of captured objects may block, too
      mutex.Lock();
      owner.descriptors -= owner.tasks.front().descriptors;
      all_descriptors -= owner.tasks.front().descriptors;
      owner.tasks.pop_front();
    }
    if (owner.tasks.empty()) owners.erase(name);
  }

  const Options options;
  Mutex mutex;
  CondVar wake;
  CondVar ended;
  std::unordered_map<std::string, Owner> owners ABSL_GUARDED_BY(mutex);
  std::deque<std::string> ready ABSL_GUARDED_BY(mutex);  // owners that wait for a thread
  size_t all_descriptors ABSL_GUARDED_BY(mutex) = 0;
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

bool OwnerTasks::Submit(const std::string& owner, std::function<void()> task, size_t descriptors) {
  MutexLock lock(&state_->mutex);
  const auto found = state_->owners.find(owner);
  if (found != state_->owners.end() && found->second.tasks.size() >= state_->options.tasks_max) {
    return false;
  }
  state_->Enqueue(state_, owner, {std::move(task), descriptors});
  return true;
}

void OwnerTasks::SubmitAlways(const std::string& owner, std::function<void()> task,
                              size_t descriptors) {
  MutexLock lock(&state_->mutex);
  state_->Enqueue(state_, owner, {std::move(task), descriptors});
}

void OwnerTasks::Destroy(const std::string& owner, std::shared_ptr<const void> object,
                         size_t descriptors) {
  if (object == nullptr) return;
  SubmitAlways(
      owner, [object = std::move(object)]() mutable { object.reset(); }, descriptors);
}

size_t OwnerTasks::pending(const std::string& owner) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->owners.find(owner);
  return found == state_->owners.end() ? 0 : found->second.tasks.size();
}

size_t OwnerTasks::descriptors(const std::string& owner) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->owners.find(owner);
  return found == state_->owners.end() ? 0 : found->second.descriptors;
}

size_t OwnerTasks::descriptors() const {
  MutexLock lock(&state_->mutex);
  return state_->all_descriptors;
}

}  // namespace crumb::server
