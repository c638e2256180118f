// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "storage/store/write_through.h"

namespace crumb::storage {
namespace {

// Limit of the rounds of a Flush, each of which writes and then counts. One suffices unless pages
// leave host memory, or are admitted, at the same moment. Fragments that are still queued in the
// last round count as not durable.
constexpr int kFlushRoundsMax = 4;
// Steps of a Flush that look at pages, in one turn: some 2 ms.
constexpr int kStepsPerTurn = 16;

FlushReport StoppingReport() {
  FlushReport report;
  report.failed = absl::UnavailableError("the store is stopping");
  return report;
}

}  // namespace

void WriteThrough::Flush(const FlushScope& scope, std::optional<uint64_t> since, FlushDone done) {
  {
    MutexLock lock(&mutex_);
    if (!refusing_) {
      new_flushes_.push_back({scope, since, std::move(done)});
      wake_.NotifyOne();
      return;
    }
  }
  done(StoppingReport());
}

void WriteThrough::BeginFlushes(std::vector<FlushWaiter> waiters) {
  for (FlushWaiter& waiter : waiters) {
    const auto [scope, added] = flushes_.try_emplace(waiter.scope);
    scope->second.next.push_back(std::move(waiter));
    if (added) flush_turns_.push_back(scope);
  }
}

WriteThrough::FlushRun WriteThrough::NewRun(std::vector<FlushWaiter> waiters) const {
  FlushRun run;
  const FlushScope& scope = waiters.front().scope;
  run.selection.only_hit = options_.flush_only_hit;
  if (scope.has_value()) {
    const std::vector<KeyspaceId> keyspaces = losses_.KeyspacesOf(*scope);
    run.selection.keyspaces.emplace(keyspaces.begin(), keyspaces.end());
  }
  run.begin = host_.BeginWalk();
  run.waiters = std::move(waiters);
  return run;
}

void WriteThrough::ServeFlush() {
  if (flush_turns_.empty()) return;
  const auto scope = flush_turns_.front();
  flush_turns_.pop_front();
  auto& [run, next] = scope->second;
  if (run.waiters.empty()) run = NewRun(std::exchange(next, {}));
  Stepped stepped = Stepped::kOn;
  for (int i = 0; i < kStepsPerTurn && stepped == Stepped::kOn; ++i) stepped = Step(run);
  if (stepped == Stepped::kFlushEnds) {
    Report(run);
    run.waiters.clear();
    if (next.empty()) {
      flushes_.erase(scope);
      return;
    }
  }
  flush_turns_.push_back(scope);
}

WriteThrough::Stepped WriteThrough::Step(FlushRun& run) {
  switch (run.step) {
    case FlushRun::Step::kBegin:
      BeginRound(run);
      return Stepped::kOn;
    case FlushRun::Step::kWriteAbsent:
      return WriteAbsent(run);
    case FlushRun::Step::kWriteQueued:
      if (WaitsForQueue(run)) return Stepped::kTurnEnds;
      run.writable = below_.Writable();
      run.missing = {};
      run.walk = run.begin;
      run.step = FlushRun::Step::kCount;
      return Stepped::kOn;
    case FlushRun::Step::kCount:
      host_.CountNotBelow(run.selection, &run.walk, &run.missing);
      return run.walk.over ? EndRound(run) : Stepped::kOn;
  }
  return Stepped::kFlushEnds;
}

// Each page is tried once: a tier smaller than host memory would never be done.
WriteThrough::Stepped WriteThrough::WriteAbsent(FlushRun& run) {
  if (run.walk.over || !below_.Writable().ok()) {
    MutexLock lock(&mutex_);
    run.queue_end = queue_.end();
    run.step = FlushRun::Step::kWriteQueued;
    return Stepped::kOn;
  }
  const std::vector<Departure> batch = host_.RefAbsentBelow(
      run.selection, DepartureQueue::kBatchFragmentsMax, DepartureQueue::kBatchBytesMax, &run.walk);
  if (batch.empty()) return Stepped::kOn;
  {
    MutexLock lock(&mutex_);
    under_way_ = batch;
  }
  Write(batch);
  return Stepped::kTurnEnds;
}

void WriteThrough::BeginRound(FlushRun& run) {
  run.before = run.missing;
  run.losses_mark = losses_.Mark(run.waiters.front().scope);
  WaitForQueueing();
  run.walk = run.begin;
  run.step = FlushRun::Step::kWriteAbsent;
}

// Fragments whose keyspace had no tenant yet when they were queued may be this tenant's.
bool WriteThrough::WaitsForQueue(const FlushRun& run) const {
  const FlushScope& scope = run.waiters.front().scope;
  MutexLock lock(&mutex_);
  if (!scope.has_value()) return queue_.HasBefore(run.queue_end);
  return queue_.HasBefore(*scope, run.queue_end) || queue_.HasBefore("", run.queue_end);
}

WriteThrough::Stepped WriteThrough::EndRound(FlushRun& run) {
  // Pages that began to leave host memory, or were read for the first time, behind kWriteAbsent are
  // written in the next round. Pages that cannot be written are as many as in the round before. One
  // that was counted and then lost would be reported twice.
  const NotBelow& missing = run.missing;
  const bool moved = missing.queued > 0 || missing.absent != run.before.absent;
  const bool lost = missing.any() && losses_.Mark(run.waiters.front().scope) != run.losses_mark;
  run.step = FlushRun::Step::kBegin;
  const bool again = (run.writable.ok() && moved) || lost;
  return again && ++run.round < kFlushRoundsMax ? Stepped::kOn : Stepped::kFlushEnds;
}

void WriteThrough::Report(const FlushRun& run) {
  const absl::Status synced = run.writable.ok() ? below_.Sync() : absl::OkStatus();
  for (const FlushWaiter& waiter : run.waiters) {
    FlushReport report;
    report.failed = synced;
    if (synced.ok()) report = ReportFor(run, waiter);
    waiter.done(report);
  }
}

FlushReport WriteThrough::ReportFor(const FlushRun& run, const FlushWaiter& waiter) const {
  FlushReport report;
  const NotBelow& missing = run.missing;
  const uint64_t in_memory = missing.absent + missing.queued + missing.refused;
  (run.writable.ok() ? report.no_room_pages : report.tier_off_pages) = in_memory;
  report.unread_pages = missing.unread;
  if (in_memory > 0) {
    report.why = run.writable.ok() ? write_failure_ : std::string(run.writable.message());
  }
  const LossLedger::Report losses = losses_.ReportSince(waiter.scope, waiter.since);
  report.lost_pages = losses.pages;
  report.mark = losses.mark;
  if (losses.foreign_mark) {
    report.failed = absl::DataLossError(
        "crumbd was started again after pages were committed: those that were not durable are "
        "gone");
  }
  return report;
}

void WriteThrough::AbandonFlushes() {
  std::vector<FlushWaiter> waiters;
  {
    MutexLock lock(&mutex_);
    waiters.swap(new_flushes_);
  }
  BeginFlushes(std::move(waiters));
  flush_turns_.clear();
  for (auto& [scope, flushes] : std::exchange(flushes_, {})) {
    for (const FlushWaiter& waiter : flushes.run.waiters) waiter.done(StoppingReport());
    for (const FlushWaiter& waiter : flushes.next) waiter.done(StoppingReport());
  }
}

}  // namespace crumb::storage
