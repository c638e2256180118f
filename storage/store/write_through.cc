// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/write_through.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"

namespace crumb::storage {
namespace {

// Fragments that are queued before other threads get the lock: some 50 us.
constexpr size_t kEnqueuedPerHold = 256;

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
      queue_({.fragments_max = options.pages_max,
              .bytes_max = options.bytes_max,
              .part_max_percent = options.part_max_percent}),
      thread_("crumb-ssd-write", [this] { Run(); }) {}

WriteThrough::~WriteThrough() { Stop(TimePoint::min()); }

size_t WriteThrough::Enqueue(std::span<const Departure> departures) {
  std::vector<Departure> refused;
  PageHandle counted = kNoPage;
  size_t pages = 0;
  for (size_t next = 0; next < departures.size();) {
    const KeyspaceId& keyspace = departures[next].meta.keyspace;
    const std::string tenant = host_.TenantOf(keyspace);
    const size_t end = std::min(departures.size(), next + kEnqueuedPerHold);
    MutexLock lock(&mutex_);
    for (; next < end && departures[next].meta.keyspace == keyspace; ++next) {
      const Departure& departure = departures[next];
      if (refusing_ || !queue_.Push(tenant, departure)) {
        refused.push_back(departure);
      } else if (std::exchange(counted, departure.page) != departure.page) {
        ++pages;
      }
    }
    if (!queue_.empty()) wake_.NotifyOne();
  }
  for (const Departure& departure : refused) {
    dropped_.Add();
    host_.Return(departure, Below::kAbsent);
  }
  return pages;
}

size_t WriteThrough::BeginQueueing() {
  MutexLock lock(&mutex_);
  ++queueing_[side_];
  return side_;
}

uint64_t WriteThrough::RoomBytes(const std::string& tenant) const {
  MutexLock lock(&mutex_);
  return refusing_ ? 0 : queue_.RoomBytes(tenant);
}

bool WriteThrough::Queueing::MayQueue(const KeyspaceId& keyspace, uint64_t bytes) {
  const auto [room, added] = room_bytes_.try_emplace(writer_.host_.TenantOf(keyspace));
  if (added) room->second = writer_.RoomBytes(room->first);
  if (bytes > room->second) return false;
  room->second -= bytes;
  return true;
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
  Queueing queueing(*this);
  std::vector<Departure> departures;
  absl::StatusOr<Slot> slot = room_.Reserve(
      keyspace, bytes,
      [&](const KeyspaceId& of_page, uint64_t page_bytes) {
        return queueing.MayQueue(of_page, page_bytes);
      },
      &departures);
  if (!departures.empty()) demoted_.Add(Enqueue(departures));
  return slot;
}

size_t WriteThrough::queued() const {
  MutexLock lock(&mutex_);
  return queue_.size() + under_way_.size();
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
  bool stopped_before = false;
  {
    MutexLock lock(&mutex_);
    refusing_ = true;
    stopped_before = stopping_;
    if (!stopping_) stop_by_ = deadline;
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.Join();
  std::vector<Departure> left;
  {
    MutexLock lock(&mutex_);
    left = queue_.TakeAll();
  }
  for (const Departure& departure : left) {
    dropped_.Add();
    host_.Return(departure, Below::kAbsent);
  }
  AbandonFlushes();
  if (!stopped_before) LogPagesLeft();
}

void WriteThrough::LogPagesLeft() const {
  if (options_.bytes_max == 0) return;  // there is no tier below
  NotBelow left;
  PageSelection admitted;
  admitted.only_hit = options_.flush_only_hit;
  for (PageWalk walk = host_.BeginWalk(); !walk.over;) {
    host_.CountNotBelow(admitted, &walk, &left);
  }
  if (!left.any()) return;
  LogWarning(
      "{} pages are in host memory alone: they are lost unless another crumbd takes this memory "
      "over. The SSD: {}. Run `crumb flush` before stopping crumbd",
      left.absent + left.queued + left.refused, below_.Writable().ToString());
}

void WriteThrough::Run() {
  std::vector<Departure> batch;
  std::vector<FlushWaiter> new_flushes;
  while (true) {
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && new_flushes_.empty() && flush_turns_.empty() && !stopping_) {
        wake_.Wait(&mutex_);
      }
      const bool idle = queue_.empty() && flush_turns_.empty();
      if (stopping_ && (idle || StopIsDue())) return;
      queue_.TakeBatch(&batch);
      under_way_ = batch;
      new_flushes.swap(new_flushes_);
    }
    Write(batch);
    BeginFlushes(std::exchange(new_flushes, {}));
    ServeFlush();
  }
}

bool WriteThrough::StopIsDue() const {
  return stopping_ && std::chrono::steady_clock::now() >= stop_by_;
}

void WriteThrough::Write(std::span<const Departure> batch) {
  if (batch.empty()) return;
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
  if (!writes.empty()) {
    const std::vector<absl::Status> statuses = below_.Put(writes);
    for (size_t i = 0; i < written.size(); ++i) Finish(*written[i], statuses[i]);
  }
  MutexLock lock(&mutex_);
  under_way_.clear();
  batch_ended_.NotifyAll();
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

}  // namespace crumb::storage
