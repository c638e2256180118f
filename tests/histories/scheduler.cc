// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/histories/scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "fmt/format.h"

namespace crumb::histories {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kGuardBytes = 4096;
// Virtual time of one step.
constexpr uint64_t kStepNs = 1000;
// Any instant but zero, so that "long ago" exists.
constexpr uint64_t kStartNs = uint64_t{1'000'000} * 1'000'000'000;
// A condition variable may return without a signal; 1 in so many choices does.
constexpr uint64_t kSpuriousWakeups = 512;
// After so many choices, in the mean, some fiber becomes slower or faster than the others.
constexpr uint64_t kReweighting = 128;
// glibc's value of a pthread_once_t whose routine has run.
constexpr pthread_once_t kOnceDone = 2;
constexpr uint32_t kWeights[] = {1, 8, 64};

void* MakeStack() {
  void* stack = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) std::abort();
  if (::mprotect(stack, kGuardBytes, PROT_NONE) != 0) std::abort();
  return stack;
}

}  // namespace

Scheduler* Scheduler::current_ = nullptr;

Scheduler::Scheduler(Options options)
    : options_(std::move(options)), random_(options_.seed), now_ns_(kStartNs) {
  fibers_.push_back(std::make_unique<Fiber>());
  fibers_.front()->name = "driver";
  running_ = fibers_.front().get();
}

Scheduler::~Scheduler() {
  for (const auto& fiber : fibers_) {
    if (fiber->stack != nullptr) ::munmap(fiber->stack, kStackBytes);
  }
}

void Scheduler::Install() { current_ = this; }
void Scheduler::Uninstall() { current_ = nullptr; }

void Scheduler::Enter() {
  Scheduler& self = *current_;
  Fiber& fiber = *self.running_;
  fiber.result = fiber.body(fiber.argument);
  fiber.state = State::kDone;
  self.WakeWaiters(State::kJoin, &fiber);
  self.Switch();
  std::abort();  // a fiber that is done is never chosen
}

int Scheduler::Create(pthread_t* thread, void* (*body)(void*), void* argument) {
  auto fiber = std::make_unique<Fiber>();
  fiber->id = fibers_.size();
  fiber->name = fmt::format("thread {}", fiber->id);
  fiber->body = body;
  fiber->argument = argument;
  fiber->stack = MakeStack();
  if (::getcontext(&fiber->context) != 0) return EAGAIN;
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  ::makecontext(&fiber->context, &Scheduler::Enter, 0);
  *thread = static_cast<pthread_t>(fiber->id);
  fibers_.push_back(std::move(fiber));
  MaybePreempt();
  return 0;
}

int Scheduler::Join(pthread_t thread, void** result) {
  Fiber& fiber = *fibers_.at(static_cast<size_t>(thread));
  while (fiber.state != State::kDone) Block(State::kJoin, &fiber, UINT64_MAX);
  if (result != nullptr) *result = fiber.result;
  return 0;
}

void Scheduler::SetName(const char* name) { running_->name = name; }

void Scheduler::Yield(int steps) {
  for (int i = 0; i < steps; ++i) Switch();
}

void Scheduler::Settle() {
  moves_time_ = false;
  Block(State::kIdle, nullptr, UINT64_MAX);
  moves_time_ = true;
}

void Scheduler::KillOthers() {
  for (const auto& fiber : fibers_) {
    if (fiber.get() != running_ && fiber->state != State::kDone) fiber->state = State::kKilled;
  }
}

void Scheduler::Sleep(Duration duration) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  Block(State::kSleep, nullptr, now_ns_ + static_cast<uint64_t>(std::max<int64_t>(ns, 0)));
}

// The C library's own would wait for another fiber in the kernel, which lets none run. A routine is
// not interrupted (MaybePreempt): libraries of this process outlive a node that crashes, and a
// routine whose fiber was killed would never be done for the next one.
int Scheduler::Once(pthread_once_t* control, void (*routine)()) {
  while (onces_.contains(control)) Switch();
  if (*control == kOnceDone) return 0;
  onces_.insert(control);
  routine();
  *control = kOnceDone;
  onces_.erase(control);
  return 0;
}

int Scheduler::Lock(pthread_mutex_t* mutex) {
  MaybePreempt();
  Ownership* held = &mutexes_[mutex];
  const bool recursive = mutex->__data.__kind == PTHREAD_MUTEX_RECURSIVE_NP;
  if (recursive && held->owner == running_) {
    ++held->count;
    return 0;
  }
  while (held->owner != nullptr) {
    Block(State::kMutex, mutex, UINT64_MAX);
    held = &mutexes_[mutex];
  }
  *held = {running_, 1};
  return 0;
}

int Scheduler::TryLock(pthread_mutex_t* mutex) {
  MaybePreempt();
  Ownership& held = mutexes_[mutex];
  if (held.owner != nullptr) return EBUSY;
  held = {running_, 1};
  return 0;
}

int Scheduler::Unlock(pthread_mutex_t* mutex) {
  const auto held = mutexes_.find(mutex);
  if (held == mutexes_.end() || held->second.owner != running_) return EPERM;
  if (--held->second.count > 0) return 0;
  mutexes_.erase(held);
  WakeWaiters(State::kMutex, mutex);
  MaybePreempt();
  return 0;
}

int Scheduler::Wait(pthread_cond_t* condition, pthread_mutex_t* mutex, uint64_t deadline_ns) {
  mutexes_.erase(mutex);
  WakeWaiters(State::kMutex, mutex);
  running_->timed_out = false;
  Block(State::kCondition, condition, deadline_ns);
  const bool timed_out = running_->timed_out;
  Lock(mutex);
  return timed_out ? ETIMEDOUT : 0;
}

int Scheduler::Notify(pthread_cond_t* condition, bool all) {
  std::vector<Fiber*> waiting;
  for (const auto& fiber : fibers_) {
    if (fiber->state == State::kCondition && fiber->waits_for == condition) {
      waiting.push_back(fiber.get());
    }
  }
  if (waiting.empty()) return 0;
  if (!all) waiting = {waiting[Random(waiting.size())]};
  for (Fiber* fiber : waiting) fiber->state = State::kReady;
  MaybePreempt();
  return 0;
}

ssize_t Scheduler::FillRandom(void* buffer, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const uint64_t word = random_();
    const size_t part = std::min(sizeof(word), bytes - done);
    std::memcpy(static_cast<char*>(buffer) + done, &word, part);
    done += part;
  }
  return static_cast<ssize_t>(bytes);
}

void Scheduler::MaybePreempt() {
  if (!onces_.empty()) return;
  if (options_.preemption > 0 && Random(1024) < options_.preemption) Switch();
}

void Scheduler::Block(State state, const void* waits_for, uint64_t deadline_ns) {
  running_->state = state;
  running_->waits_for = waits_for;
  running_->deadline_ns = deadline_ns;
  Switch();
  running_->deadline_ns = UINT64_MAX;
}

void Scheduler::WakeWaiters(State state, const void* waits_for) {
  for (const auto& fiber : fibers_) {
    if (fiber->state == state && fiber->waits_for == waits_for) fiber->state = State::kReady;
  }
}

void Scheduler::Switch() {
  now_ns_ += kStepNs;
  Fiber* const from = running_;
  Fiber* const to = Choose();
  if (to == from) return;
  ++switches_;
  running_ = to;
  const int error = errno;
  ::swapcontext(&from->context, &to->context);
  errno = error;
}

Scheduler::Fiber* Scheduler::Choose() {
  while (true) {
    WakeExpired();
    if (Fiber* ready = ChooseReady()) return ready;
    Fiber& driver = *fibers_.front();
    if (driver.state == State::kIdle) {
      driver.state = State::kReady;
      return &driver;
    }
    uint64_t earliest = UINT64_MAX;
    for (const auto& fiber : fibers_) {
      if (fiber->state == State::kCondition || fiber->state == State::kSleep) {
        earliest = std::min(earliest, fiber->deadline_ns);
      }
    }
    if (earliest == UINT64_MAX) {
      options_.deadlocked(DescribeWaits());
      std::abort();
    }
    now_ns_ = std::max(now_ns_, earliest);
  }
}

// A fiber that sleeps is at work (a slow disk), and so no reason for Settle to return: time moves
// on for it. One that waits for a condition with a deadline is not.
void Scheduler::WakeExpired() {
  for (const auto& fiber : fibers_) {
    const bool waits = fiber->state == State::kCondition || fiber->state == State::kSleep;
    if (!waits || fiber->deadline_ns > now_ns_) continue;
    fiber->timed_out = true;
    fiber->state = State::kReady;
  }
}

Scheduler::Fiber* Scheduler::ChooseReady() {
  if (Random(kReweighting) == 0) {
    fibers_[Random(fibers_.size())]->weight = kWeights[Random(std::size(kWeights))];
  }
  if (Random(kSpuriousWakeups) == 0) {
    Fiber& fiber = *fibers_[Random(fibers_.size())];
    if (fiber.state == State::kCondition) fiber.state = State::kReady;
  }
  uint64_t total = 0;
  Fiber* sleeper = nullptr;
  for (const auto& fiber : fibers_) {
    if (fiber->state == State::kReady) total += fiber->weight;
    const bool sleeps = fiber->state == State::kSleep && fiber->deadline_ns != UINT64_MAX;
    if (sleeps && (sleeper == nullptr || fiber->deadline_ns < sleeper->deadline_ns)) {
      sleeper = fiber.get();
    }
  }
  if (total == 0) {
    if (moves_time_ || sleeper == nullptr) return nullptr;
    now_ns_ = std::max(now_ns_, sleeper->deadline_ns);
    sleeper->state = State::kReady;
    return sleeper;
  }
  uint64_t place = Random(total);
  for (const auto& fiber : fibers_) {
    if (fiber->state != State::kReady) continue;
    if (place < fiber->weight) return fiber.get();
    place -= fiber->weight;
  }
  return nullptr;
}

std::string Scheduler::DescribeWaits() const {
  std::string text;
  for (const auto& fiber : fibers_) {
    const char* what = fiber->state == State::kMutex       ? "a mutex"
                       : fiber->state == State::kCondition ? "a condition"
                       : fiber->state == State::kJoin      ? "the end of a thread"
                                                           : nullptr;
    if (what != nullptr) text += fmt::format(" {} waits for {};", fiber->name, what);
  }
  return text;
}

}  // namespace crumb::histories
