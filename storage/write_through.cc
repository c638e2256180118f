// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/write_through.h"

#include <algorithm>
#include <utility>

namespace crumb::storage {
namespace {

// One sync covers a batch: large enough to be cheap, small enough to be soon.
constexpr size_t kBatchFragmentsMax = 64;
constexpr uint64_t kBatchBytesMax = uint64_t{64} << 20;

}  // namespace

WriteThrough::WriteThrough(const Options& options, HostTier& host, FragmentTier& below,
                           FragmentTier::PageFunction durable)
    : options_(options),
      host_(host),
      below_(below),
      durable_(std::move(durable)),
      thread_("crumb-ssd-write", [this] { Run(); }) {}

WriteThrough::~WriteThrough() { Stop(TimePoint::min()); }

void WriteThrough::Enqueue(std::span<const Departure> departures) {
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
}

uint64_t WriteThrough::room_bytes() const {
  MutexLock lock(&mutex_);
  if (refusing_ || queue_.size() >= options_.pages_max) return 0;
  return options_.bytes_max - std::min(options_.bytes_max, queue_bytes_);
}

size_t WriteThrough::queued() const {
  MutexLock lock(&mutex_);
  return queue_.size() + under_way_.size();
}

void WriteThrough::Flush(FlushDone done) {
  {
    MutexLock lock(&mutex_);
    if (!refusing_) {
      flushes_.push_back({enqueued_, std::move(done)});
      wake_.NotifyOne();
      return;
    }
  }
  done(absl::UnavailableError("the store is stopping"));
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
  for (FlushWaiter& flush : flushes) flush.done(absl::UnavailableError("the store is stopping"));
}

void WriteThrough::Run() {
  std::vector<Departure> batch;
  while (NextBatch(&batch)) {
    if (!batch.empty()) {
      WriteBatch(batch);
      EndBatch(batch.size());
    }
    AnswerFlushes();
  }
}

bool WriteThrough::NextBatch(std::vector<Departure>* batch) {
  batch->clear();
  uint64_t bytes = 0;
  MutexLock lock(&mutex_);
  while (queue_.empty() && flushes_.empty() && !stopping_) wake_.Wait(&mutex_);
  if (stopping_ && (queue_.empty() || std::chrono::steady_clock::now() >= stop_by_)) return false;
  while (!queue_.empty() && batch->size() < kBatchFragmentsMax && bytes < kBatchBytesMax) {
    bytes += queue_.front().meta.bytes;
    batch->push_back(queue_.front());
    queue_.pop_front();
  }
  queue_bytes_ -= bytes;
  under_way_ = *batch;
  return true;
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
  if (status.ok() || absl::IsAlreadyExists(status)) {
    if (host_.Return(departure, Below::kStored)) {
      durable_pages_.Add();
      durable_(departure.meta.keyspace, departure.meta.key);
    }
    return;
  }
  const bool can_never_be = absl::IsResourceExhausted(status) || absl::IsAborted(status);
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
  std::vector<FlushDone> ready;
  {
    MutexLock lock(&mutex_);
    while (!flushes_.empty() && flushes_.front().ticket <= written_) {
      ready.push_back(std::move(flushes_.front().done));
      flushes_.pop_front();
    }
  }
  if (ready.empty()) return;
  WriteWhatDidNotFit();
  absl::Status status = below_.Writable();
  if (status.ok()) status = below_.Sync();
  for (const FlushDone& done : ready) done(status);
}

void WriteThrough::WriteWhatDidNotFit() {
  // Each page is tried once: a tier smaller than host memory would never be done.
  for (uint64_t left = host_.Stats().pages; left > 0 && below_.Writable().ok();) {
    const std::vector<Departure> batch =
        host_.RefAbsentBelow(std::min<uint64_t>(left, kBatchFragmentsMax), options_.flush_only_hit);
    if (batch.empty()) return;
    {
      MutexLock lock(&mutex_);
      under_way_ = batch;
    }
    WriteBatch(batch);
    EndBatch(0);
    left -= std::min<uint64_t>(left, batch.size());
  }
}

}  // namespace crumb::storage
