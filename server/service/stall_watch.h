// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"

namespace crumb::server {

// A stream, or a call, that sometimes waits for its caller: for a message to arrive, or for one to
// be read. A stream that waits longer than the StallWatch allows is stalled, and ends. Its states:
//
//   working --BeginWait--> waiting --EndWait--> working
//                             |
//                             +--Claim by StallWatch--> stalled (final; Stalled() is called once)
//
// EndWait and Claim exclude each other: whichever comes first has its effect, the other returns
// false. Thread-safe.
class StallableStream {
 public:
  virtual ~StallableStream() = default;

  // The stream waits for its caller from now on. `progressed`: it got further since the wait
  // before; otherwise this wait counts from where that one began, so that a caller who sends a byte
  // now and then is stalled, too.
  void BeginWait(TimePoint now, bool progressed) {
    if (progressed || waits_since_ == kWorking) waits_since_ = now;
    waiting_since_.store(waits_since_);
  }
  // Notes that the caller did something. Returns false if the stream is stalled: Stalled() has been
  // or is being called.
  bool EndWait() {
    TimePoint waiting = waiting_since_.load();
    while (waiting != kStalled) {
      if (waiting_since_.compare_exchange_weak(waiting, kWorking)) return true;
    }
    return false;
  }
  bool stalled() const { return waiting_since_.load() == kStalled; }

  // Returns whether the stream, while it waits, waits for its caller to read, and not to send.
  virtual bool WaitsForReader() const { return true; }

  // Called by StallWatch. Returns true if the stream has waited since before `since`; it is stalled
  // now, and StallWatch calls Stalled().
  bool Claim(TimePoint since) {
    TimePoint waiting = waiting_since_.load();
    return waiting != kWorking && waiting != kStalled && waiting <= since &&
           waiting_since_.compare_exchange_strong(waiting, kStalled);
  }
  // Ends the stream. Called once, on StallWatch's thread, without locks.
  virtual void Stalled() = 0;

 private:
  static constexpr TimePoint kWorking = TimePoint();
  static constexpr TimePoint kStalled = TimePoint::max();

  TimePoint waits_since_ = kWorking;  // used by BeginWait alone
  std::atomic<TimePoint> waiting_since_{kWorking};
};

// Ends streams that wait too long for their callers. Its thread, crumb-stalls, sleeps while there
// are no streams. Thread-safe.
class StallWatch {
 public:
  // `clock` must outlive this.
  // `timeout` is limits.stream_progress_timeout; a stream ends at most an eighth of it late.
  StallWatch(Duration timeout, const Clock& clock);
  ~StallWatch();

  // Watches the stream as long as it lives, or until its place is removed.
  using Place = std::list<std::weak_ptr<StallableStream>>::iterator;
  Place Add(const std::weak_ptr<StallableStream>& stream);
  // Stops watching a stream. REQUIRES: Add returned `place`, and the stream still exists.
  void Remove(Place place);

  // From now on streams whose callers read nothing are stalled after `timeout`, if that is shorter
  // than before: crumbd stops.
  void HastenReaders(Duration timeout);

  // Streams that were stalled and have not ended: gRPC ends a stream only when it can write to the
  // connection again, and a peer may read nothing from it.
  int64_t lingering();

 private:
  void Run();
  // The streams that live; forgets the others.
  std::vector<std::shared_ptr<StallableStream>> Streams();

  const Clock& clock_;
  Mutex mutex_;
  CondVar changed_;
  const Duration timeout_;
  Duration reader_timeout_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool hastened_ ABSL_GUARDED_BY(mutex_) = false;  // the thread is to look at once
  // The thread waits for a first stream, and not for an instant.
  bool idle_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<std::weak_ptr<StallableStream>> streams_ ABSL_GUARDED_BY(mutex_);
  Thread thread_;
};

}  // namespace crumb::server
