// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
//
// Functions of the C library that this program defines itself, so that calls from the code under
// test and from the C++ library lead to the scheduler while a simulation runs, and to the C library
// otherwise.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/random.h>
#include <time.h>

#include "tests/histories/scheduler.h"

namespace {

using crumb::histories::Scheduler;

constexpr uint64_t kSecondNs = 1'000'000'000;

// The definition behind this one.
template <typename Function>
Function* Next(Function*, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

#define CRUMB_NEXT(function) (Next(static_cast<decltype(function)*>(nullptr), #function))

uint64_t ToNs(const timespec& time) {
  return static_cast<uint64_t>(time.tv_sec) * kSecondNs + static_cast<uint64_t>(time.tv_nsec);
}

}  // namespace

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) noexcept {
  if (Scheduler* scheduler = Scheduler::Current()) {
    return scheduler->Create(thread, body, argument);
  }
  static auto* const next = CRUMB_NEXT(pthread_create);
  return next(thread, attributes, body, argument);
}

int pthread_join(pthread_t thread, void** result) {
  if (Scheduler* scheduler = Scheduler::Current()) return scheduler->Join(thread, result);
  static auto* const next = CRUMB_NEXT(pthread_join);
  return next(thread, result);
}

int pthread_setname_np(pthread_t thread, const char* name) noexcept {
  if (Scheduler* scheduler = Scheduler::Current()) {
    scheduler->SetName(name);
    return 0;
  }
  static auto* const next = CRUMB_NEXT(pthread_setname_np);
  return next(thread, name);
}

int pthread_detach(pthread_t thread) noexcept {
  // A fiber is destroyed with the scheduler, joined or not.
  if (Scheduler::Current() != nullptr) return 0;
  static auto* const next = CRUMB_NEXT(pthread_detach);
  return next(thread);
}

int pthread_once(pthread_once_t* control, void (*routine)()) {
  if (Scheduler* scheduler = Scheduler::Current()) return scheduler->Once(control, routine);
  static auto* const next = CRUMB_NEXT(pthread_once);
  return next(control, routine);
}

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  if (Scheduler* scheduler = Scheduler::Current()) return scheduler->Lock(mutex);
  static auto* const next = CRUMB_NEXT(pthread_mutex_lock);
  return next(mutex);
}

int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  if (Scheduler* scheduler = Scheduler::Current()) return scheduler->TryLock(mutex);
  static auto* const next = CRUMB_NEXT(pthread_mutex_trylock);
  return next(mutex);
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  if (Scheduler* scheduler = Scheduler::Current()) return scheduler->Unlock(mutex);
  static auto* const next = CRUMB_NEXT(pthread_mutex_unlock);
  return next(mutex);
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (Scheduler* scheduler = Scheduler::Current()) {
    return scheduler->Wait(condition, mutex, UINT64_MAX);
  }
  static auto* const next = CRUMB_NEXT(pthread_cond_wait);
  return next(condition, mutex);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* deadline) {
  if (Scheduler* scheduler = Scheduler::Current()) {
    return scheduler->Wait(condition, mutex, ToNs(*deadline));
  }
  static auto* const next = CRUMB_NEXT(pthread_cond_timedwait);
  return next(condition, mutex, deadline);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  if (Scheduler* scheduler = Scheduler::Current()) {
    return scheduler->Wait(condition, mutex, ToNs(*deadline));
  }
  static auto* const next = CRUMB_NEXT(pthread_cond_clockwait);
  return next(condition, mutex, clock, deadline);
}

int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (Scheduler* scheduler = Scheduler::Current()) return scheduler->Notify(condition, false);
  static auto* const next = CRUMB_NEXT(pthread_cond_signal);
  return next(condition);
}

int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  if (Scheduler* scheduler = Scheduler::Current()) return scheduler->Notify(condition, true);
  static auto* const next = CRUMB_NEXT(pthread_cond_broadcast);
  return next(condition);
}

int pthread_cond_destroy(pthread_cond_t* condition) noexcept {
  if (Scheduler::Current() != nullptr) return 0;
  static auto* const next = CRUMB_NEXT(pthread_cond_destroy);
  return next(condition);
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const bool is_time = clock == CLOCK_MONOTONIC || clock == CLOCK_REALTIME;
  if (Scheduler* scheduler = Scheduler::Current(); scheduler != nullptr && is_time) {
    const uint64_t now = scheduler->now_ns();
    time->tv_sec = static_cast<time_t>(now / kSecondNs);
    time->tv_nsec = static_cast<long>(now % kSecondNs);
    return 0;
  }
  static auto* const next = CRUMB_NEXT(clock_gettime);
  return next(clock, time);
}

ssize_t getrandom(void* buffer, size_t bytes, unsigned flags) {
  if (Scheduler* scheduler = Scheduler::Current()) return scheduler->FillRandom(buffer, bytes);
  static auto* const next = CRUMB_NEXT(getrandom);
  return next(buffer, bytes, flags);
}

}  // extern "C"
