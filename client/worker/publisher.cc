// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/publisher.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Number of loaded pages that wait to be made visible; four of the longest prefixes of an Acquire.
constexpr size_t kLoadedMax = 65536;

// Bytes that are written before they are committed, while crumbd copies those before them. With
// less a batch takes more calls, with more its last part is copied while this thread waits: a batch
// of 4 MiB is fastest with 512 KiB to 1 MiB (`crumb-bench store`, put of 32 pages).
constexpr size_t kCommitBytes = size_t{1} << 20;

}  // namespace

Publisher::Publisher(const WorkerOptions& options, Client& client, PageReader& reader,
                     SharedPages* shared, WorkerTally& tally, std::function<void()> refused)
    : options_(options),
      client_(client),
      reader_(reader),
      shared_(shared),
      tally_(tally),
      refused_(std::move(refused)),
      pid_(::getpid()) {}

Publisher::~Publisher() {
  // In a forked child there is no thread to join, and the lock may be held forever.
  if (::getpid() != pid_) return;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

void Publisher::CountDropped(Counter& counter, size_t pages) {
  counter.Add(pages);
  client_.Count({.publish_dropped_pages = pages});
}

void Publisher::Publish(std::shared_ptr<const KeyspaceBinding> keyspace,
                        std::shared_ptr<const Page> page) {
  if (!keyspace->known_to_crumbd || ::getpid() != pid_) {
    tally_.publish_dropped_unavailable.Add();
    return;
  }
  bool dropped = false;
  {
    MutexLock lock(&mutex_);
    dropped = queue_.size() >= options_.publish_queue_max;
    if (!dropped) {
      queue_.push_back({std::move(keyspace), std::move(page), false});
      ++queued_;
      EnsureStarted();
    }
  }
  if (dropped) CountDropped(tally_.publish_dropped_queue, 1);
}

void Publisher::PublishInPlace(std::shared_ptr<const KeyspaceBinding> keyspace,
                               std::vector<std::shared_ptr<const Page>> pages) {
  if (!keyspace->known_to_crumbd || ::getpid() != pid_ || pages.empty()) return;
  size_t dropped = 0;
  {
    MutexLock lock(&mutex_);
    for (std::shared_ptr<const Page>& page : pages) {
      if (loaded_.size() >= kLoadedMax) {
        ++dropped;
        continue;
      }
      loaded_.push_back({keyspace, std::move(page), true});
      ++queued_;
    }
    EnsureStarted();
  }
  tally_.publish_dropped_queue.Add(dropped);
}

void Publisher::NoteRefusedWindow() {
  tally_.windows_refused.Add();
  client_.Count({.windows_refused = 1});
}

void Publisher::NoteQuality(std::span<const QualitySample> layers) {
  tally_.windows_measured.Add();
  client_.Count({.quality = {layers.begin(), layers.end()}});
}

void Publisher::EnsureStarted() {
  if (!std::exchange(started_, true)) thread_ = Thread("crumb-publish", [this] { Run(); });
  changed_.NotifyAll();
}

void Publisher::RunSoon(std::function<void()> task) {
  if (::getpid() != pid_) return;
  MutexLock lock(&mutex_);
  if (task_ || stopping_) return;
  task_ = std::move(task);
  EnsureStarted();
}

absl::Status Publisher::WaitIdle(Duration timeout) {
  if (::getpid() != pid_) return absl::OkStatus();
  const TimePoint deadline = Clock::Real().Now() + timeout;
  MutexLock lock(&mutex_);
  const uint64_t target = queued_;
  while (done_ < target) {
    if (!changed_.WaitUntil(&mutex_, deadline) && done_ < target) {
      return absl::DeadlineExceededError(std::to_string(target - done_) +
                                         " pages are still to be published");
    }
  }
  return absl::OkStatus();
}

void Publisher::Run() {
  while (true) {
    std::vector<Item> batch;
    std::function<void()> task;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && loaded_.empty() && !task_ && !stopping_) changed_.Wait(&mutex_);
      if (stopping_) return;
      task = std::exchange(task_, nullptr);
      batch = TakeBatch();
    }
    if (task) task();
    if (batch.empty()) continue;
    const size_t pages = batch.size();
    PublishBatch(std::move(batch));  // outside the lock, because pages may free memory
    MutexLock lock(&mutex_);
    done_ += pages;
    changed_.NotifyAll();
  }
}

// Moves the leading pages of a queue that one Reserve and one Commit can serve to `batch`.
void Publisher::TakeSome(std::deque<Item>& from, size_t most, std::vector<Item>* batch) {
  while (!from.empty() && batch->size() < most) {
    const Item& next = from.front();
    if (!batch->empty() && (next.keyspace->id != batch->front().keyspace->id ||
                            next.page->bytes != batch->front().page->bytes)) {
      return;
    }
    batch->push_back(std::move(from.front()));
    from.pop_front();
  }
}

std::vector<Publisher::Item> Publisher::TakeBatch() {
  std::vector<Item> batch;
  TakeSome(queue_.empty() ? loaded_ : queue_, static_cast<size_t>(options_.publish_batch), &batch);
  return batch;
}

std::vector<Publisher::Item> Publisher::CommitInPlace(std::vector<Item> batch) {
  std::vector<Item> there, rest;
  for (Item& item : batch) (shared_->Has(*item.page) ? there : rest).push_back(std::move(item));
  std::erase_if(rest, [](const Item& item) { return item.loaded; });
  if (there.empty()) return rest;
  std::vector<std::shared_ptr<const Page>> pages;
  std::vector<FragmentHeader> headers;
  for (const Item& item : there) {
    pages.push_back(item.page);
    headers.push_back(HeaderOf(item, item.page->tile_sums));
  }
  const auto outcomes =
      shared_->Commit(there.front().keyspace->id, pages, headers, options_.publish_deadline);
  for (size_t i = 0; i < there.size(); ++i) {
    const CommitOutcome outcome = outcomes.ok() ? (*outcomes)[i] : CommitOutcome::kUnknown;
    const bool stored = outcome == CommitOutcome::kStored;
    if (stored) tally_.pool_pages.Add();
    if (there[i].loaded) continue;
    if (stored && !shared_->copies()) continue;
    // A page that is not visible here may become visible elsewhere. If crumbd refuses it there,
    // that is counted.
    rest.push_back(std::move(there[i]));
  }
  return rest;
}

void Publisher::PublishBatch(std::vector<Item> batch) {
  if (shared_ != nullptr) batch = CommitInPlace(std::move(batch));
  if (batch.empty()) return;
  const size_t tiles_bytes = batch.front().page->bytes;
  const size_t bytes = tiles_bytes + FragmentHeaderBytes(options_.own_tiles().tiles());
  size_t next = 0;
  while (next < batch.size()) {
    const int wanted = static_cast<int>(batch.size() - next);
    PendingPages pending{.keyspace = batch.front().keyspace->id, .keys = {}};
    for (size_t i = next; i < batch.size(); ++i) pending.keys.push_back(batch[i].page->key);
    auto slots = client_.Reserve(wanted, bytes, pending, options_.publish_deadline);
    if (!slots.ok()) return CountFailure(slots.status(), batch.size() - next);
    if (slots->empty()) return CountDropped(tally_.publish_dropped_room, batch.size() - next);
    size_t counted = 0;
    const std::span<const Item> items = std::span(batch).subspan(next, slots->size());
    const absl::Status committed = WriteAndCommit(items, *std::move(slots), &counted);
    next += counted;
    if (!committed.ok()) return CountFailure(committed, batch.size() - next);
  }
}

absl::Status Publisher::WriteAndCommit(std::span<const Item> items, std::vector<StagingSlot> slots,
                                       size_t* counted) {
  const size_t tiles_bytes = items.front().page->bytes;
  const size_t slot_bytes = slots.front().bytes().size();
  const size_t part = std::max<size_t>(1, kCommitBytes / slot_bytes);
  std::unique_ptr<PendingCommit> pending;
  const auto finish = [&]() -> absl::Status {
    if (pending == nullptr) return absl::OkStatus();
    CRUMB_ASSIGN_OR_RETURN(const auto outcomes, std::exchange(pending, nullptr)->Finish());
    for (const CommitOutcome outcome : outcomes) CountOutcome(outcome, slot_bytes);
    *counted += outcomes.size();
    return absl::OkStatus();
  };
  for (size_t next = 0; next < slots.size(); next += part) {
    const size_t end = std::min(next + part, slots.size());
    std::vector<std::shared_ptr<const Page>> pages;
    std::vector<std::byte*> to;
    std::vector<StagingSlot> written;
    for (size_t i = next; i < end; ++i) {
      pages.push_back(items[i].page);
      to.push_back(slots[i].bytes().data());
      written.push_back(std::move(slots[i]));
    }
    absl::StatusOr<std::vector<std::vector<uint32_t>>> sums = reader_.Read(pages, to);
    for (size_t i = 0; sums.ok() && i < pages.size(); ++i) {
      const FragmentHeader header = HeaderOf(items[next + i], std::move((*sums)[i]));
      EncodeFragmentHeader(header, written[i].bytes().subspan(
                                       pages[i]->bytes, FragmentHeaderBytes(header.range.tiles())));
    }
    CRUMB_RETURN_IF_ERROR(finish());
    CRUMB_RETURN_IF_ERROR(sums.status());
    pending = client_.StartCommit(items.front().keyspace->id, std::move(written), tiles_bytes,
                                  options_.publish_deadline);
  }
  return finish();
}

FragmentHeader Publisher::HeaderOf(const Item& item, std::vector<uint32_t> sums) const {
  const Page& page = *item.page;
  FragmentHeader header;
  header.format = page.format;
  header.over_int2_prefix = page.over_int2_prefix;
  header.layout_id = kernels::kTileLayoutId;
  header.tile_bytes = static_cast<uint32_t>(page.tile_bytes);
  header.generation = item.keyspace->generation;
  header.keyspace = item.keyspace->id;
  header.key = page.key;
  header.parent = page.parent;
  header.position = page.position + 1;
  header.range = options_.own_tiles();
  header.tile_sums = std::move(sums);
  return header;
}

void Publisher::CountOutcome(CommitOutcome outcome, size_t bytes) {
  switch (outcome) {
    case CommitOutcome::kStored:
      tally_.published_pages.Add();
      tally_.published_bytes.Add(bytes);
      break;
    case CommitOutcome::kDeduplicated:
      tally_.deduplicated_pages.Add();
      break;
    case CommitOutcome::kNoRoom:
      CountDropped(tally_.publish_dropped_room, 1);
      break;
    case CommitOutcome::kUnknown:
    case CommitOutcome::kRefused:
      tally_.publish_refused.Add();
      refused_();
      break;
  }
}

void Publisher::CountFailure(const absl::Status& status, size_t pages) {
  if (absl::IsResourceExhausted(status)) {
    CountDropped(tally_.publish_dropped_room, pages);
    return;
  }
  if (absl::IsNotFound(status) || absl::IsInvalidArgument(status)) {
    tally_.publish_refused.Add(pages);
    refused_();
    return;
  }
  CountDropped(tally_.publish_dropped_unavailable, pages);
}

}  // namespace crumb::client
