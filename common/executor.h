// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/metrics.h"
#include "common/mutex.h"
#include "common/tenant_budget.h"
#include "common/thread.h"

namespace crumb {

// A few named threads behind one bounded queue. The queue is fair between tenants: a tenant may
// have only its part of the places (TenantBudget), and threads take one task of each tenant in
// rotation, in the order of Submit within a tenant. So a task waits for at most one task of every
// other tenant, however many others have queued. Idle threads sleep. Thread-safe.
class Executor {
 public:
  struct Options {
    std::string name = "executor";
    int threads = 1;
    size_t queue_max = 1024;  // tasks waiting; more are refused
    int64_t part_max_percent =
        100;  // of the places, for one tenant; 100: tenants are not told apart
  };

  explicit Executor(const Options& options);
  // Runs what is queued, then joins.
  ~Executor();

  // Queues `task` for a tenant. Returns false, and counts it, when the queue is full or Stop was
  // called.
  bool Submit(std::function<void()> task) { return Submit("", std::move(task)); }
  bool Submit(const std::string& tenant, std::function<void()> task);

  // Refuses new tasks, runs what is queued, joins. Idempotent.
  void Stop();

  size_t queued() const;
  uint64_t refused() const { return refused_.value(); }

 private:
  void Run();
  // REQUIRES: a task is queued.
  std::function<void()> TakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  TenantBudget places_;
  mutable Mutex mutex_;
  CondVar wake_;
  // Tasks by tenant, and the tenants that have some, the one whose task runs next at the front.
  std::unordered_map<std::string, std::deque<std::function<void()>>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> rotation_ ABSL_GUARDED_BY(mutex_);
  size_t queued_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Counter refused_;
  std::vector<Thread> threads_;
};

}  // namespace crumb
