// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "storage/fragment_tier.h"
#include "storage/host_tier.h"

namespace crumb::storage {

// Brings host fragments to the tier below in batches, on a thread of its own that sleeps when there
// is nothing to write. Queued fragments keep their slots, so the queue is bounded in pages and in
// bytes; what does not fit is not written now, and counted. Thread-safe.
class WriteThrough {
 public:
  struct Options {
    size_t pages_max = 4096;      // fragments queued
    uint64_t bytes_max = 0;       // and their bytes
    bool flush_only_hit = false;  // what Flush takes beyond the queue
  };
  using FlushDone = std::function<void(absl::Status)>;

  // `durable` hears of each page that is below as a whole, on the writer's thread.
  WriteThrough(const Options& options, HostTier& host, FragmentTier& below,
               FragmentTier::PageFunction durable);
  ~WriteThrough();

  // Queues what it has room for and returns the rest to the host tier as absent below.
  void Enqueue(std::span<const Departure> departures);
  // Bytes of fragments there is room for.
  uint64_t room_bytes() const;

  // Calls `done` when everything queued before is durable, and with it what did not fit earlier.
  void Flush(FlushDone done);

  // Blocks until no write of these pages is under way.
  void WaitFor(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  // Writes what is queued until `deadline`, then ends the thread. Later calls of Enqueue refuse.
  void Stop(TimePoint deadline);

  size_t queued() const;
  uint64_t dropped() const { return dropped_.value(); }
  uint64_t durable_pages() const { return durable_pages_.value(); }

 private:
  struct FlushWaiter {
    uint64_t ticket = 0;  // done when so many were written
    FlushDone done;
  };

  void Run();
  // Waits for work and marks a batch as under way; false: the thread ends.
  bool NextBatch(std::vector<Departure>* batch);
  void WriteBatch(std::span<const Departure> batch);
  void Finish(const Departure& departure, const absl::Status& status);
  void EndBatch(size_t taken_from_queue);
  void AnswerFlushes();
  void WriteWhatDidNotFit();

  const Options options_;
  HostTier& host_;
  FragmentTier& below_;
  const FragmentTier::PageFunction durable_;
  Counter dropped_;
  Counter durable_pages_;

  mutable Mutex mutex_;
  CondVar wake_;
  CondVar batch_ended_;
  std::deque<Departure> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t queue_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Departure> under_way_ ABSL_GUARDED_BY(mutex_);
  uint64_t enqueued_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t written_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<FlushWaiter> flushes_ ABSL_GUARDED_BY(mutex_);
  bool refusing_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  TimePoint stop_by_ ABSL_GUARDED_BY(mutex_);
  Thread thread_;
};

}  // namespace crumb::storage
