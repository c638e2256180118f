// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/thread_pool.h"

#include <sched.h>

#include <algorithm>

namespace crumb::models {

namespace {

constexpr int kThreadsMax = 256;

// Counts the CPUs of this process's affinity, which containers restrict below the online ones.
int UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace

ThreadPool::ThreadPool(int threads, const std::string& name) {
  const int total = std::clamp(threads > 0 ? threads : UsableCpus(), 1, kThreadsMax);
  for (int i = 1; i < total; ++i) workers_.emplace_back(name, [this] { Work(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  workers_.clear();
}

void ThreadPool::ParallelFor(int count, const std::function<void(int)>& body) {
  if (count <= 0) return;
  if (count == 1 || workers_.empty()) {
    for (int i = 0; i < count; ++i) body(i);
    return;
  }
  MutexLock turn(&callers_);
  {
    MutexLock lock(&mutex_);
    body_ = &body;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    ++loop_;
    wake_.NotifyAll();
  }
  RunLoop(body, count);
  MutexLock lock(&mutex_);
  body_ = nullptr;  // a worker that wakes up later finds no work
  while (busy_ > 0) done_.Wait(&mutex_);
}

void ThreadPool::RunLoop(const std::function<void(int)>& body, int count) {
  for (int i = next_.fetch_add(1); i < count; i = next_.fetch_add(1)) body(i);
}

void ThreadPool::Work() {
  int64_t seen = 0;
  MutexLock lock(&mutex_);
  while (true) {
    while (!stopping_ && (body_ == nullptr || loop_ == seen)) wake_.Wait(&mutex_);
    if (stopping_) return;
    seen = loop_;
    const std::function<void(int)>* body = body_;
    const int count = count_;
    ++busy_;
    mutex_.Unlock();
    RunLoop(*body, count);
    mutex_.Lock();
    if (--busy_ == 0) done_.NotifyAll();
  }
}

}  // namespace crumb::models
