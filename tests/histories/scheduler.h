// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>
#include <sys/types.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "common/clock.h"

namespace crumb::histories {

// Runs all threads of a simulated node as fibers of one real thread, in an order that follows from
// a seed. While a scheduler is installed, the pthread functions for threads, mutexes and condition
// variables, clock_gettime and getrandom lead here (interposed.cc), so the code under test is the
// one that production links.
//
// A fiber is ready, or waits for a mutex, a condition, another fiber's end or a point in time. At
// each operation on a mutex the running fiber may be replaced by another ready one. Time is
// virtual: it passes by a microsecond with each step, and when no fiber is ready it moves on to the
// earliest deadline. When no fiber is ready and none has a deadline, the program is deadlocked, and
// `deadlocked` is called with a description.
//
// The driver is the fiber that calls Install; its functions are those under "For the driver".
class Scheduler {
 public:
  struct Options {
    uint64_t seed = 0;
    // Chance, in 1/1024, that an operation on a mutex lets another fiber run.
    uint32_t preemption = 64;
    std::function<void(const std::string&)> deadlocked;
  };

  explicit Scheduler(Options options);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Null outside a simulation.
  static Scheduler* Current() { return current_; }

  // Called by the driver.
  void Install();
  void Uninstall();
  // Lets other fibers run for about that many steps.
  void Yield(int steps);
  // Returns when every other fiber waits. Time does not move on to deadlines meanwhile.
  void Settle();
  // No fiber but the caller runs again: the death of a process. Their stacks stay as they are.
  void KillOthers();
  // How often a fiber gave way to another.
  uint64_t switches() const { return switches_; }

  // Called by fibers.
  void Sleep(Duration duration);
  TimePoint now() const { return TimePoint(std::chrono::nanoseconds(now_ns_)); }
  uint64_t Random(uint64_t bound) { return random_() % bound; }

  // The interposed functions call these and return their results.
  int Create(pthread_t* thread, void* (*body)(void*), void* argument);
  int Join(pthread_t thread, void** result);
  void SetName(const char* name);
  int Once(pthread_once_t* control, void (*routine)());
  int Lock(pthread_mutex_t* mutex);
  int TryLock(pthread_mutex_t* mutex);
  int Unlock(pthread_mutex_t* mutex);
  // `deadline_ns` is on the virtual clock; UINT64_MAX: none.
  int Wait(pthread_cond_t* condition, pthread_mutex_t* mutex, uint64_t deadline_ns);
  int Notify(pthread_cond_t* condition, bool all);
  uint64_t now_ns() const { return now_ns_; }
  ssize_t FillRandom(void* buffer, size_t bytes);

 private:
  enum class State : uint8_t { kReady, kMutex, kCondition, kJoin, kSleep, kIdle, kDone, kKilled };
  struct Fiber {
    uint64_t id = 0;
    std::string name;
    State state = State::kReady;
    const void* waits_for = nullptr;
    uint64_t deadline_ns = UINT64_MAX;
    bool timed_out = false;
    uint32_t weight = 1;
    void* (*body)(void*) = nullptr;
    void* argument = nullptr;
    void* result = nullptr;
    void* stack = nullptr;
    ucontext_t context;
  };
  struct Ownership {
    Fiber* owner = nullptr;
    int count = 0;
  };

  static void Enter();
  void MaybePreempt();
  // Gives way; returns when this fiber is chosen again.
  void Switch();
  Fiber* Choose();
  Fiber* ChooseReady();
  void WakeExpired();
  void Block(State state, const void* waits_for, uint64_t deadline_ns);
  void WakeWaiters(State state, const void* waits_for);
  std::string DescribeWaits() const;

  static Scheduler* current_;

  const Options options_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Fiber>> fibers_;  // the driver is the first
  Fiber* running_ = nullptr;
  std::unordered_set<const void*> onces_;               // objects whose routines run
  std::unordered_map<const void*, Ownership> mutexes_;  // locked ones
  uint64_t now_ns_;
  uint64_t switches_ = 0;
  bool moves_time_ = true;
};

}  // namespace crumb::histories
