// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/metrics.h"
#include "common/mutex.h"
#include "common/tenant_budget.h"
#include "common/thread.h"

namespace crumb {

// A few named threads behind one bounded queue. The queue is fair between tenants: a tenant may
// have only its part of the places (TenantBudget), threads take one task of each tenant in
// rotation, in the order of Submit within a tenant, and the tasks of one tenant never occupy the
// last thread. So a task waits for at most one step of every other tenant, however many others
// have queued. Tasks that take long are submitted in steps: behind each step the other tenants are
// served. Without tenants (part_max_percent 100), tasks run in the order of Submit on all threads.
// Idle threads sleep. Thread-safe.
class Executor {
 public:
  struct Options {
    std::string name = "executor";
    int threads = 1;
    size_t queue_max = 1024;  // tasks waiting; more are refused
    // One tenant may have this part of the queue. At 100 tenants are not separated. Below 100 one
    // tenant's tasks run on `threads` - 1 threads at most, if there are several.
    int64_t part_max_percent = 100;
  };
  // One step of a task. Returns true if there is another one.
  using Step = std::function<bool()>;

  explicit Executor(const Options& options);
  // Runs the queued tasks, then joins the threads.
  ~Executor();

  // Queues `task` for a tenant. Returns false, and counts it, when the queue is full or Stop was
  // called.
  bool Submit(std::function<void()> task) { return Submit("", std::move(task)); }
  bool Submit(const std::string& tenant, std::function<void()> task);
  // Submit for a task in steps, which run one after the other: the next step runs before the other
  // tasks of the tenant and after those of other tenants. A task that has begun takes no place.
  bool SubmitSteps(const std::string& tenant, Step step);

  // Refuses new tasks, runs the queued ones and joins the threads. Idempotent.
  void Stop();

  size_t queued() const;
  uint64_t refused() const { return refused_.value(); }

 private:
  struct Task {
    Step step;
    bool begun = false;
  };
  struct Tenant {
    std::deque<Task> tasks;
    int running = 0;
    bool in_rotation = false;
  };
  using Tenants = std::map<std::string, Tenant>;

  void Run();
  // Takes the next task out. REQUIRES: rotation_ is not empty.
  Task TakeLocked(Tenants::iterator* tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends a step of a tenant's task, and queues the task again if `more`.
  void EndStepLocked(Tenants::iterator tenant, Task task, bool more)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Puts the tenant at the end of the rotation if a thread may take a task of it. Returns true if
  // it was not there.
  bool RotateLocked(Tenants::iterator tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const int tenant_threads_max_;
  TenantBudget places_;
  mutable Mutex mutex_;
  CondVar wake_;
  // Tenants with tasks that wait or run, and those of them whose next task may begin, the next one
  // at the front.
  Tenants tenants_ ABSL_GUARDED_BY(mutex_);
  std::deque<Tenants::iterator> rotation_ ABSL_GUARDED_BY(mutex_);
  size_t queued_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Counter refused_;
  std::vector<Thread> threads_;
};

}  // namespace crumb
