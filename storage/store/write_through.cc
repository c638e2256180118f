// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/write_through.h"

#include <algorithm>
#include <utility>

namespace crumb::storage {
namespace {

// One sync for each extent covers a batch: large enough to be cheap, small enough to be soon.
constexpr size_t kBatchFragmentsMax = 64;
constexpr uint64_t kBatchBytesMax = uint64_t{64} << 20;
// Rounds of a Flush, each of which writes and then counts. One is enough unless pages leave host
// memory, or are admitted, at the same moment. What the last one finds on its way to the tier below
// counts as not durable.
constexpr int kFlushRoundsMax = 4;

absl::Status Stopping() { return absl::UnavailableError("the store is stopping"); }

// Counts the pages that departures belong to. Those of one page follow each other.
size_t PagesOf(std::span<const Departure> departures) {
  size_t pages = 0;
  for (size_t i = 0; i < departures.size(); ++i) {
    if (i == 0 || departures[i].page != departures[i - 1].page) ++pages;
  }
  return pages;
}

FlushReport StoppingReport() {
  FlushReport report;
  report.failed = Stopping();
  return report;
}

}  // namespace

WriteThrough::WriteThrough(const Options& options, HostTier& host, HostRoom& room,
                           LossLedger& losses, FragmentTier& below,
                           FragmentTier::PageFunction durable)
    : options_(options),
      host_(host),
      room_(room),
      losses_(losses),
      below_(below),
      durable_(std::move(durable)),
      thread_("crumb-ssd-write", [this] { Run(); }) {}

WriteThrough::~WriteThrough() { Stop(TimePoint::min()); }

size_t WriteThrough::Enqueue(std::span<const Departure> departures) {
  size_t taken = 0;
  {
    MutexLock lock(&mutex_);
    for (; taken < departures.size() && !refusing_; ++taken) {
      const uint64_t bytes = departures[taken].meta.bytes;
      if (queue_.size() >= options_.pages_max || queue_bytes_ + bytes > options_.bytes_max) break;
      queue_.push_back(departures[taken]);
      queue_bytes_ += bytes;
      ++enqueued_;
    }
    if (taken > 0) wake_.NotifyOne();
  }
  for (const Departure& refused : departures.subspan(taken)) {
    dropped_.Add();
    host_.Return(refused, Below::kAbsent);
  }
  return taken;
}

WriteThrough::BegunQueueing WriteThrough::BeginQueueing() {
  MutexLock lock(&mutex_);
  ++queueing_[side_];
  const bool takes = !refusing_ && queue_.size() < options_.pages_max;
  const uint64_t room_bytes = options_.bytes_max - std::min(options_.bytes_max, queue_bytes_);
  return {.side = side_, .room_bytes = takes ? room_bytes : 0};
}

void WriteThrough::EndQueueing(size_t side) {
  MutexLock lock(&mutex_);
  if (--queueing_[side] == 0 && side != side_) queueing_ended_.NotifyAll();
}

void WriteThrough::WaitForQueueing() {
  MutexLock lock(&mutex_);
  const size_t begun = std::exchange(side_, 1 - side_);
  while (queueing_[begun] > 0) queueing_ended_.Wait(&mutex_);
}

absl::StatusOr<Slot> WriteThrough::Reserve(const KeyspaceId& keyspace, uint64_t bytes) {
  const Queueing queueing(*this);
  std::vector<Departure> departures;
  absl::StatusOr<Slot> slot = room_.Reserve(keyspace, bytes, queueing.room_bytes(), &departures);
  if (!departures.empty()) {
    demoted_.Add(PagesOf(std::span(departures).first(Enqueue(departures))));
  }
  return slot;
}

size_t WriteThrough::queued() const {
  MutexLock lock(&mutex_);
  return queue_.size() + under_way_.size();
}

void WriteThrough::Flush(const FlushScope& scope, std::optional<uint64_t> since, FlushDone done) {
  {
    MutexLock lock(&mutex_);
    if (!refusing_) {
      flushes_.push_back({enqueued_, scope, since, std::move(done)});
      wake_.NotifyOne();
      return;
    }
  }
  done(StoppingReport());
}

void WriteThrough::WaitFor(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  std::vector<PageKey> wanted(keys.begin(), keys.end());
  std::sort(wanted.begin(), wanted.end());
  const auto is_wanted = [&](const Departure& departure) {
    return departure.meta.keyspace == keyspace &&
           std::binary_search(wanted.begin(), wanted.end(), departure.meta.key);
  };
  MutexLock lock(&mutex_);
  while (std::any_of(under_way_.begin(), under_way_.end(), is_wanted)) batch_ended_.Wait(&mutex_);
}

void WriteThrough::Stop(TimePoint deadline) {
  {
    MutexLock lock(&mutex_);
    refusing_ = true;
    if (!stopping_) stop_by_ = deadline;
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.Join();
  std::deque<Departure> left;
  std::deque<FlushWaiter> flushes;
  {
    MutexLock lock(&mutex_);
    left.swap(queue_);
    queue_bytes_ = 0;
    flushes.swap(flushes_);
  }
  for (const Departure& departure : left) {
    dropped_.Add();
    host_.Return(departure, Below::kAbsent);
  }
  for (FlushWaiter& flush : flushes) flush.done(StoppingReport());
}

void WriteThrough::Run() {
  std::vector<Departure> batch;
  while (true) {
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && flushes_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (stopping_ && (queue_.empty() || StopIsDue())) return;
      TakeBatch(&batch);
    }
    if (!batch.empty()) {
      WriteBatch(batch);
      EndBatch(batch.size());
    }
    AnswerFlushes();
  }
}

bool WriteThrough::StopIsDue() const {
  return stopping_ && std::chrono::steady_clock::now() >= stop_by_;
}

void WriteThrough::TakeBatch(std::vector<Departure>* batch) {
  batch->clear();
  uint64_t bytes = 0;
  while (!queue_.empty() && batch->size() < kBatchFragmentsMax && bytes < kBatchBytesMax) {
    bytes += queue_.front().meta.bytes;
    batch->push_back(queue_.front());
    queue_.pop_front();
  }
  queue_bytes_ -= bytes;
  under_way_ = *batch;
}

void WriteThrough::WriteBatch(std::span<const Departure> batch) {
  std::vector<FragmentWrite> writes;
  std::vector<const Departure*> written;
  for (const Departure& departure : batch) {
    const std::span<const std::byte> room = host_.View(departure);
    if (room.empty()) {
      host_.Return(departure, Below::kAbsent);  // removed meanwhile
      continue;
    }
    writes.push_back({departure.meta, room});
    written.push_back(&departure);
  }
  if (writes.empty()) return;
  const std::vector<absl::Status> statuses = below_.Put(writes);
  for (size_t i = 0; i < written.size(); ++i) Finish(*written[i], statuses[i]);
}

void WriteThrough::Finish(const Departure& departure, const absl::Status& status) {
  // Some tiles that are there already do not make the fragment durable; all of them do.
  if (status.ok() || (absl::IsAlreadyExists(status) && below_.Has(departure.meta))) {
    const bool whole = host_.Return(departure, Below::kStored);
    // The tier may have evicted the page already, and said so before it counted as stored here.
    if (!below_.Has(departure.meta)) {
      host_.ForgetBelow(departure.meta.keyspace, departure.meta.key);
    } else if (whole) {
      durable_pages_.Add();
      durable_(departure.meta.keyspace, departure.meta.key);
    }
    return;
  }
  const bool can_never_be = absl::IsResourceExhausted(status) || absl::IsAborted(status);
  write_failure_ = std::string(status.message());
  dropped_.Add();
  host_.Return(departure, can_never_be ? Below::kRefused : Below::kAbsent);
}

void WriteThrough::EndBatch(size_t taken_from_queue) {
  MutexLock lock(&mutex_);
  under_way_.clear();
  written_ += taken_from_queue;
  batch_ended_.NotifyAll();
}

void WriteThrough::AnswerFlushes() {
  std::vector<FlushWaiter> ready;
  {
    MutexLock lock(&mutex_);
    while (!flushes_.empty() && flushes_.front().ticket <= written_) {
      ready.push_back(std::move(flushes_.front()));
      flushes_.pop_front();
    }
  }
  if (ready.empty()) return;
  const Flushed flushed = FlushAll();
  for (const FlushWaiter& flush : ready) flush.done(ReportFor(flushed, flush));
}

FlushReport WriteThrough::ReportFor(const Flushed& flushed, const FlushWaiter& waiter) {
  FlushReport report;
  report.failed = flushed.failed;
  if (!report.failed.ok()) return report;
  NotBelow missing = flushed.missing.all;
  if (waiter.scope.has_value()) {
    const auto of_tenant = flushed.missing.tenants.find(*waiter.scope);
    missing = of_tenant == flushed.missing.tenants.end() ? NotBelow() : of_tenant->second;
  }
  const uint64_t in_memory = missing.absent + missing.queued + missing.refused;
  (flushed.writable.ok() ? report.no_room_pages : report.tier_off_pages) = in_memory;
  report.unread_pages = missing.unread;
  if (in_memory > 0) {
    report.why = flushed.writable.ok() ? write_failure_ : std::string(flushed.writable.message());
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

WriteThrough::Flushed WriteThrough::FlushAll() {
  const PageWalk begin = host_.BeginWalk();
  Flushed flushed;
  bool again = true;
  for (int round = 0; again && round < kFlushRoundsMax; ++round) {
    const NotBelow before = flushed.missing.all;
    const uint64_t lost_before = losses_.total();
    WaitForQueueing();
    if (!WriteAbsent(begin) || !WriteQueued()) {
      flushed.failed = Stopping();
      return flushed;
    }
    flushed.writable = below_.Writable();
    flushed.missing = {};
    for (PageWalk walk = begin; !walk.over;) {
      host_.CountNotBelow(options_.flush_only_hit, &walk, &flushed.missing);
    }
    // Pages that began to leave host memory, or were read for the first time, behind WriteAbsent
    // are written in the next round. Pages that cannot be written are as many as in the round
    // before. One that was counted and then lost would be reported twice.
    const NotBelow& missing = flushed.missing.all;
    const bool moved = missing.queued > 0 || missing.absent != before.absent;
    const bool lost = missing.any() && losses_.total() != lost_before;
    again = (flushed.writable.ok() && moved) || lost;
  }
  if (flushed.writable.ok()) flushed.failed = below_.Sync();
  return flushed;
}

bool WriteThrough::WriteQueued() {
  uint64_t last;
  {
    MutexLock lock(&mutex_);
    last = enqueued_;
  }
  while (true) {
    std::vector<Departure> batch;
    {
      MutexLock lock(&mutex_);
      if (StopIsDue()) return false;
      if (written_ >= last || queue_.empty()) return true;
      TakeBatch(&batch);
    }
    WriteBatch(batch);
    EndBatch(batch.size());
  }
}

bool WriteThrough::WriteAbsent(PageWalk walk) {
  // Each page is tried once: a tier smaller than host memory would never be done.
  for (; !walk.over && below_.Writable().ok();) {
    const std::vector<Departure> batch =
        host_.RefAbsentBelow(kBatchFragmentsMax, options_.flush_only_hit, &walk);
    {
      MutexLock lock(&mutex_);
      under_way_ = batch;
    }
    WriteBatch(batch);
    EndBatch(0);
    MutexLock lock(&mutex_);
    if (StopIsDue()) return false;
  }
  return true;
}

}  // namespace crumb::storage
