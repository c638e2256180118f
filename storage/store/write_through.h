// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/flush_report.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "storage/fragment_tier.h"
#include "storage/host_room.h"
#include "storage/host_tier.h"

namespace crumb::storage {

// Brings host fragments to the tier below in batches, on a thread of its own that sleeps when there
// is nothing to write. Queued fragments keep their slots, so the queue is bounded in pages and in
// bytes. A fragment that does not fit stays in host memory, counted, and is written when its page
// leaves or by the next Flush; if its page leaves while the queue is full, it is lost, and the next
// Flush reports it. Thread-safe.
class WriteThrough {
 public:
  struct Options {
    size_t pages_max = 4096;      // fragments queued
    uint64_t bytes_max = 0;       // and their bytes
    bool flush_only_hit = false;  // Flush leaves out pages that were not read since they came
  };
  using FlushDone = std::function<void(const FlushReport&)>;

  // The side of the count that a Queueing began on, and the room that the queue had then.
  struct BegunQueueing {
    size_t side = 0;
    uint64_t room_bytes = 0;
  };
  // Exists while fragments that are marked as queued in host memory may not be in the queue yet:
  // from before the mark until after Enqueue. A Flush waits for those that began before it, so that
  // it neither leaves such a fragment out nor reports it as not durable. The holder does not wait
  // for the writer meanwhile. REQUIRES: the WriteThrough outlives it.
  class Queueing {
   public:
    explicit Queueing(WriteThrough& writer) : writer_(writer), begun_(writer.BeginQueueing()) {}
    Queueing(const Queueing&) = delete;
    Queueing& operator=(const Queueing&) = delete;
    ~Queueing() { writer_.EndQueueing(begun_.side); }

    // The bytes that the queue had room for when this began; 0 if it took no more fragments.
    uint64_t room_bytes() const { return begun_.room_bytes; }

   private:
    WriteThrough& writer_;
    const BegunQueueing begun_;
  };

  // `durable` hears of each page that is below as a whole, on the writer's thread.
  // The other arguments outlive this.
  WriteThrough(const Options& options, HostTier& host, HostRoom& room, LossLedger& losses,
               FragmentTier& below, FragmentTier::PageFunction durable);
  ~WriteThrough();

  // Queues what it has room for and returns the rest to the host tier as absent below. Returns how
  // many it queued, from the first on. REQUIRES: the departures were marked as queued, and Enqueue
  // is called, during one Queueing.
  size_t Enqueue(std::span<const Departure> departures);
  // Reserves a slot of host memory and queues the pages that leave for it. Errors as
  // HostRoom::Reserve.
  absl::StatusOr<Slot> Reserve(const KeyspaceId& keyspace, uint64_t bytes);

  // Writes what is queued and, page by page and each once, what else host memory has and the tier
  // below lacks. Then calls `done`, on the writer's thread unless the writer is stopping, with
  // everything but durable_pages. `scope` and `since` as TieredStore::Flush has them.
  void Flush(const FlushScope& scope, std::optional<uint64_t> since, FlushDone done);

  // Blocks until no write of these pages is under way.
  void WaitFor(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  // Writes what is queued until `deadline`, then ends the thread. Later calls of Enqueue refuse.
  void Stop(TimePoint deadline);

  size_t queued() const;
  uint64_t dropped() const { return dropped_.value(); }
  uint64_t durable_pages() const { return durable_pages_.value(); }
  // Returns how many pages Reserve queued, in full or in part.
  uint64_t demoted() const { return demoted_.value(); }

 private:
  struct FlushWaiter {
    uint64_t ticket = 0;  // begins when so many were written
    FlushScope scope;
    std::optional<uint64_t> since;
    FlushDone done;
  };

  void Run();
  // Moves the next fragments from the queue to `batch` and marks them as under way.
  void TakeBatch(std::vector<Departure>* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool StopIsDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteBatch(std::span<const Departure> batch);
  void Finish(const Departure& departure, const absl::Status& status);
  void EndBatch(size_t taken_from_queue);
  BegunQueueing BeginQueueing();
  void EndQueueing(size_t side);
  // Waits until every Queueing that exists now has ended. For the writer's thread.
  void WaitForQueueing();
  void AnswerFlushes();
  struct Flushed {
    absl::Status failed;    // not OK: it ended early
    absl::Status writable;  // of the tier below
    NotBelowCounts missing;
  };
  Flushed FlushAll();
  FlushReport ReportFor(const Flushed& flushed, const FlushWaiter& waiter);
  // Each ends early, with false, when the writer has to stop.
  bool WriteQueued();
  bool WriteAbsent(PageWalk walk);

  const Options options_;
  HostTier& host_;
  HostRoom& room_;
  LossLedger& losses_;
  FragmentTier& below_;
  const FragmentTier::PageFunction durable_;
  Counter dropped_;
  Counter durable_pages_;
  Counter demoted_;
  std::string write_failure_;  // the writer thread's: why the last write failed

  mutable Mutex mutex_;
  CondVar wake_;
  CondVar batch_ended_;
  std::deque<Departure> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t queue_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Departure> under_way_ ABSL_GUARDED_BY(mutex_);
  uint64_t enqueued_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t written_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<FlushWaiter> flushes_ ABSL_GUARDED_BY(mutex_);
  // Queueings by the side they began on. New ones begin on `side_`; WaitForQueueing changes it and
  // waits until the other side has none.
  std::array<uint64_t, 2> queueing_ ABSL_GUARDED_BY(mutex_) = {};
  size_t side_ ABSL_GUARDED_BY(mutex_) = 0;
  CondVar queueing_ended_;
  bool refusing_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  TimePoint stop_by_ ABSL_GUARDED_BY(mutex_);
  Thread thread_;
};

}  // namespace crumb::storage
