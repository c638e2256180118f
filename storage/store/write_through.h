// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
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
#include "storage/host/host_room.h"
#include "storage/host/host_tier.h"
#include "storage/store/departure_queue.h"

namespace crumb::storage {

// Brings host fragments to the tier below in batches, on a thread of its own that sleeps when there
// is nothing to write. Queued fragments keep their slots, so the queue is bounded in pages and in
// bytes, for each tenant and for all (DepartureQueue). A fragment that does not fit is counted and
// stays in host memory; it is written when its page leaves or by the next Flush. If its page leaves
// while the queue has no room for it, it is lost, and the next Flush reports it. Thread-safe.
//
// The thread alternates between a batch of the queue, in which tenants take turns, and a step of a
// Flush, in which the scopes that are being flushed take turns. So neither the pages that a tenant
// queues nor its Flushes delay another tenant's pages and Flushes by more than a batch each. The
// queue and the thread are in write_through.cc, Flushes in write_through_flush.cc.
class WriteThrough {
 public:
  struct Options {
    size_t pages_max = 4096;  // fragments queued
    uint64_t bytes_max = 0;   // bytes of the fragments queued; 0: no tier is below
    // The percentage of both that one tenant may have; 100 if the server does not distinguish
    // tenants.
    int64_t part_max_percent = 100;
    bool flush_only_hit = false;  // Flush leaves out pages that were not read since they came
  };
  using FlushDone = std::function<void(const FlushReport&)>;

  // Exists while fragments that are marked as queued in host memory may not be in the queue yet:
  // from before the mark until after Enqueue. A Flush waits for those that began before it, so that
  // it neither leaves such a fragment out nor reports it as not durable. The holder does not wait
  // for the writer meanwhile. REQUIRES: the WriteThrough outlives it.
  class Queueing {
   public:
    explicit Queueing(WriteThrough& writer) : writer_(writer), side_(writer.BeginQueueing()) {}
    Queueing(const Queueing&) = delete;
    Queueing& operator=(const Queueing&) = delete;
    ~Queueing() { writer_.EndQueueing(side_); }

    // Whether the queue has room for `bytes` more of the keyspace's tenant; if so, this Queueing
    // counts them as queued. The queue's room is read once for each tenant. May be called with
    // HostState::mutex held.
    bool MayQueue(const KeyspaceId& keyspace, uint64_t bytes);

   private:
    WriteThrough& writer_;
    const size_t side_;  // index in WriteThrough::queueing_ of the count that includes this
    // Room that is left for each tenant that MayQueue was called for.
    std::map<std::string, uint64_t> room_bytes_;
  };

  // `durable` is called on the writer's thread for each page that the tier below has completely.
  // The other arguments must outlive this object.
  WriteThrough(const Options& options, HostTier& host, HostRoom& room, LossLedger& losses,
               FragmentTier& below, FragmentTier::PageFunction durable);
  ~WriteThrough();

  // Queues the fragments that it has room for and returns the rest to the host tier as absent
  // below. Returns the number of pages of which it queued fragments. REQUIRES: the fragments of a
  // page are adjacent, and they were marked as queued, and are enqueued, during one Queueing.
  size_t Enqueue(std::span<const Departure> departures);
  // Reserves a slot of host memory and queues the pages that leave for it. Errors are those of
  // HostRoom::Reserve.
  absl::StatusOr<Slot> Reserve(const KeyspaceId& keyspace, uint64_t bytes);

  // Writes the queued fragments of the scope and then, page by page and each once, the fragments in
  // host memory that the tier below lacks. Then calls `done`, on the writer's thread unless the
  // writer is stopping, with a report that lacks only durable_pages. TieredStore::Flush explains
  // `scope` and `since`.
  void Flush(const FlushScope& scope, std::optional<uint64_t> since, FlushDone done);

  // Blocks until no write of these pages is under way.
  void WaitFor(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  // Writes queued fragments until `deadline`, then ends the thread. Later calls of Enqueue queue
  // nothing.
  void Stop(TimePoint deadline);

  size_t queued() const;
  uint64_t dropped() const { return dropped_.value(); }
  uint64_t durable_pages() const { return durable_pages_.value(); }
  // Returns how many pages Reserve queued, in full or in part.
  uint64_t demoted() const { return demoted_.value(); }

 private:
  // A call of Flush.
  struct FlushWaiter {
    FlushScope scope;
    std::optional<uint64_t> since;
    FlushDone done;
  };
  // A Flush on its way. It works in rounds of these steps, which take several turns each:
  //   kBegin        waits for Queueings, and looks at the pages in host memory from the start on
  //   kWriteAbsent  writes, each once, those that the tier below lacks and that are not queued
  //   kWriteQueued  lets the queue write those that were queued until now
  //   kCount        counts those that are still not below
  // and ends when a further round would change nothing.
  struct FlushRun {
    enum class Step : uint8_t { kBegin, kWriteAbsent, kWriteQueued, kCount };
    std::vector<FlushWaiter> waiters;
    PageSelection selection;
    PageWalk begin;
    Step step = Step::kBegin;
    int round = 0;
    PageWalk walk;           // position of kWriteAbsent and of kCount
    uint64_t queue_end = 0;  // kWriteQueued waits for fragments with numbers below this
    uint64_t losses_mark = 0;
    absl::Status writable;  // status of the tier below before kCount
    NotBelow missing;       // result of kCount
    NotBelow before;        // result of kCount in the previous round
  };
  // The Flushes of one scope. One runs at a time; those that are called meanwhile run after it, as
  // one Flush.
  struct ScopeFlushes {
    FlushRun run;
    std::vector<FlushWaiter> next;
  };
  using Flushes = std::map<FlushScope, ScopeFlushes>;

  // write_through.cc
  void Run();
  bool StopIsDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Write(std::span<const Departure> batch);
  void Finish(const Departure& departure, const absl::Status& status);
  size_t BeginQueueing();
  void EndQueueing(size_t side);
  uint64_t RoomBytes(const std::string& tenant) const;
  // Waits until every Queueing that exists now has ended. For the writer's thread.
  void WaitForQueueing();

  // write_through_flush.cc: for the writer's thread.
  // Gives the new calls of Flush to the runs of their scopes.
  void BeginFlushes(std::vector<FlushWaiter> waiters);
  FlushRun NewRun(std::vector<FlushWaiter> waiters) const;
  // Lets the Flush whose turn it is make steps, until it has written something, waits for the
  // queue, or has made as many as a turn may have.
  void ServeFlush();
  enum class Stepped : uint8_t { kOn, kTurnEnds, kFlushEnds };
  Stepped Step(FlushRun& run);
  void BeginRound(FlushRun& run);
  Stepped WriteAbsent(FlushRun& run);
  Stepped EndRound(FlushRun& run);
  // Whether fragments wait that the run needs to be written.
  bool WaitsForQueue(const FlushRun& run) const;
  void Report(const FlushRun& run);
  FlushReport ReportFor(const FlushRun& run, const FlushWaiter& waiter) const;
  // Reports to all callers of Flush that the store is stopping. REQUIRES: the thread has ended.
  void AbandonFlushes();
  // Logs how many pages end with this process unless its memory is handed over.
  void LogPagesLeft() const;

  const Options options_;
  HostTier& host_;
  HostRoom& room_;
  LossLedger& losses_;
  FragmentTier& below_;
  const FragmentTier::PageFunction durable_;
  Counter dropped_;
  Counter durable_pages_;
  Counter demoted_;
  // State of the writer thread alone: the message of the last write that failed, the scopes that
  // are being flushed, and the order of their turns.
  std::string write_failure_;
  Flushes flushes_;
  std::deque<Flushes::iterator> flush_turns_;

  mutable Mutex mutex_;
  CondVar wake_;
  CondVar batch_ended_;
  DepartureQueue queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<Departure> under_way_ ABSL_GUARDED_BY(mutex_);
  std::vector<FlushWaiter> new_flushes_ ABSL_GUARDED_BY(mutex_);
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
