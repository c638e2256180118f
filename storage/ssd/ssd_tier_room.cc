// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/ssd_tier.h"

// How pages leave, and how extents and index share the budget.

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "common/logging.h"
#include "storage/ssd/index_budget.h"

namespace crumb::storage {
namespace {

// An index that outgrows its part gets so many times its size: a compaction writes new tables
// beside the old ones.
constexpr uint64_t kShareToGrow = 3;
constexpr uint64_t kShareToKeep = 2;
// Pages evicted at once, so that one index sync covers many, but never more than a part of all.
constexpr size_t kEvictPagesMax = 32;
constexpr size_t kEvictPart = 64;
constexpr Duration kGrowPause = std::chrono::seconds(10);
// Pages taken out of sight before the lock is let go: some 500 us.
constexpr size_t kPagesPerHold = 512;

}  // namespace

uint64_t SsdTier::IndexShare(uint64_t factor) const {
  return std::max(IndexBytes(options_.bytes_max.value), factor * folder_->BytesBesidesExtents());
}

bool SsdTier::Grow() {
  {
    MutexLock lock(&mutex_);
    if (growing_ || clock_.Now() < grow_again_at_) return false;
    growing_ = true;
  }
  absl::Status status = absl::ResourceExhaustedError("ssd.bytes_max is reached");
  uint32_t number = 0;
  if (files_->bytes() + folder_->extent_bytes() + IndexShare(kShareToGrow) <=
      options_.bytes_max.value) {
    absl::StatusOr<uint32_t> created = files_->Create();
    status = created.status();
    if (created.ok()) {
      number = *created;
    } else {
      LogWarning("SSD tier {}: no further extent: {}", options_.path,
                 std::string(status.message()));
    }
    MutexLock lock(&mutex_);
    if (!status.ok()) grow_again_at_ = clock_.Now() + kGrowPause;
  }
  MutexLock lock(&mutex_);
  growing_ = false;
  if (status.ok()) slots_.AddRegion(number, folder_->extent_bytes());
  return status.ok();
}

bool SsdTier::IndexIsFull(size_t more) const {
  return table_.pages().fragments() + more >= static_cast<uint64_t>(options_.fragments_max);
}

size_t SsdTier::HideVictims(TimePoint now) {
  const size_t wanted = std::clamp<size_t>(table_.pages().size() / kEvictPart, 1, kEvictPagesMax);
  size_t hidden = 0;
  while (hidden < wanted) {
    const auto victim = table_.order().Victim(now, [](const Page&) { return true; });
    if (!victim) break;
    Hide(*victim, RemovalReason::kCapacity);
    ++hidden;
  }
  return hidden;
}

absl::Status SsdTier::EvictFor(uint64_t bytes) {
  const TimePoint now = clock_.Now();
  size_t evicted = 0;
  {
    MutexLock lock(&mutex_);
    evicted = HideVictims(now);
    for (const PageHandle page : slots_.OwnersOfNearlyEmptyChunk(bytes)) {
      const Page& owner = table_[page];
      if (!owner.resident || owner.references > 0 || owner.pinned_until > now) continue;
      Hide(page, RemovalReason::kCapacity);
      ++evicted;
    }
  }
  if (evicted == 0) return absl::UnavailableError("SSD tier has no room: every page is in use");
  return WriteIndex({});
}

// A folder that was filled with a larger bound has more fragments than this one allows.
void SsdTier::ShrinkIndex() {
  for (bool full = true; full;) {
    {
      MutexLock lock(&mutex_);
      if (table_.pages().fragments() <= static_cast<uint64_t>(options_.fragments_max)) return;
      full = HideVictims(clock_.Now()) > 0;
    }
    if (!WriteIndex({}).ok()) return;
  }
}

void SsdTier::ShrinkToBudget() {
  while (files_->bytes() + IndexShare(kShareToKeep) > options_.bytes_max.value) {
    if (!RemoveAnExtent()) return;
  }
}

bool SsdTier::RemoveAnExtent() {
  std::optional<uint32_t> emptiest;
  {
    MutexLock lock(&mutex_);
    emptiest = slots_.EmptiestRegion();
  }
  if (!emptiest) return false;
  // Its pages in the order of their slots, each looked at once.
  uint64_t offset = 0;
  for (bool more = true; more;) {
    MutexLock lock(&mutex_);
    std::vector<PageHandle> pages;
    for (size_t looked_at = 0; more && looked_at < kPagesPerHold; looked_at += pages.size()) {
      more = slots_.NextOwners(*emptiest, offset, pages);
      for (const PageHandle page : pages) {
        if (table_[page].resident) Hide(page, RemovalReason::kCapacity);
      }
    }
  }
  if (!WriteIndex({}).ok()) return false;
  {
    MutexLock lock(&mutex_);
    if (!slots_.RemoveRegion(*emptiest)) return false;  // it is still being read
  }
  const absl::Status status = files_->Remove(*emptiest);
  if (!status.ok()) health_.Failed(TierHealth::Operation::kWrite, status);
  return status.ok();
}

// Leaving.

void SsdTier::Hide(PageHandle page, RemovalReason reason) {
  const Page& leaving = table_[page];
  for (const Fragment& fragment : leaving.fragments) {
    leaving_.changes.Delete(FragmentKey(leaving.keyspace, leaving.key, fragment.range));
  }
  leaving_.changes.Delete(AccessKey(leaving.keyspace, leaving.key));
  leaving_.pages.push_back(page);
  table_.Ref(page);
  table_.Remove(page, reason, clock_.Now());
}

absl::Status SsdTier::WriteIndex(const IndexBatch& batch) {
  Leaving leaving;
  {
    MutexLock lock(&mutex_);
    while (index_busy_) index_free_.Wait(&mutex_);
    // Another call's write may have included this call's changes.
    if (batch.changes.empty() && leaving_.changes.changes.empty()) return absl::OkStatus();
    index_busy_ = true;
    std::swap(leaving, leaving_);
  }
  absl::Status status = WriteLeaving(leaving, batch);
  if (!status.ok()) health_.Failed(TierHealth::Operation::kWrite, status);
  MutexLock lock(&mutex_);
  index_busy_ = false;
  index_free_.NotifyAll();  // a caller that finds nothing left to do would wake no other
  if (status.ok()) {
    for (const Slot& slot : leaving.slots) slots_.Free(slot);
    for (const PageHandle page : leaving.pages) table_.Unref(page);
    return status;
  }
  // The failed changes go in front of those that came meanwhile, which may be about the same pages:
  // the newer ones, which are few, are moved behind the older.
  const auto append = [](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  append(leaving.changes.changes, leaving_.changes.changes);
  append(leaving.slots, leaving_.slots);
  append(leaving.pages, leaving_.pages);
  leaving_ = std::move(leaving);
  return absl::UnavailableError(status.message());
}

absl::Status SsdTier::WriteLeaving(Leaving& leaving, const IndexBatch& batch) {
  auto& changes = leaving.changes.changes;
  size_t written = 0;
  absl::Status status;
  while (status.ok() && changes.size() - written > kIndexBatchChangesMax) {
    const auto from = changes.begin() + static_cast<ptrdiff_t>(written);
    status = index_->Write({{from, from + static_cast<ptrdiff_t>(kIndexBatchChangesMax)}});
    if (status.ok()) written += kIndexBatchChangesMax;
  }
  if (status.ok()) {
    IndexBatch last{{changes.begin() + static_cast<ptrdiff_t>(written), changes.end()}};
    last.changes.insert(last.changes.end(), batch.changes.begin(), batch.changes.end());
    status = index_->Write(last);
  }
  if (!status.ok())
    changes.erase(changes.begin(), changes.begin() + static_cast<ptrdiff_t>(written));
  return status;
}

absl::StatusOr<uint32_t> SsdTier::Remove(const KeyspaceId& keyspace,
                                         std::span<const PageKey> keys) {
  uint32_t removed = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kPagesPerHold) {
    MutexLock lock(&mutex_);
    WaitForPut();
    for (const PageKey& key : keys.subspan(begin, std::min(kPagesPerHold, keys.size() - begin))) {
      const PageHandle page = table_.pages().Find(keyspace, key);
      if (page == kNoPage) continue;
      Hide(page, RemovalReason::kDeleted);
      ++removed;
    }
  }
  // Also when no page is there: the entries of one may still be in the index, for an earlier write
  // of its removal failed.
  const absl::Status written = WriteIndex({});
  Announce();
  if (!written.ok()) return written;
  return removed;
}

absl::StatusOr<uint64_t> SsdTier::Drop(const KeyspaceId& keyspace, uint64_t generation) {
  {
    MutexLock lock(&mutex_);
    if (table_.pages().GenerationOf(keyspace) < generation) {
      table_.RaiseGeneration(keyspace, generation);
      leaving_.changes.Put(GenerationKey(keyspace), EncodeNumber(generation));
    }
  }
  // With the generation durable, no page below it comes back, whatever happens to the deletes: they
  // only give the room back. A call that is repeated after an error gets here again.
  const absl::Status raised = WriteIndex({});
  // A disk that fails is not tried for each piece: the deletes wait for a later index write.
  bool writes = raised.ok();
  uint64_t dropped = 0;
  for (size_t unwritten = 0;;) {
    {
      MutexLock lock(&mutex_);
      WaitForPut();
      const std::vector<PageHandle> pages =
          table_.pages().PagesOlderThan(keyspace, generation, kPagesPerHold);
      if (pages.empty()) break;
      for (const PageHandle page : pages) Hide(page, RemovalReason::kDeleted);
      dropped += pages.size();
      unwritten += pages.size();
    }
    if (!writes || unwritten < kIndexBatchChangesMax) continue;
    writes = WriteIndex({}).ok();
    unwritten = 0;
  }
  if (dropped > 0) WriteIndex({}).IgnoreError();
  Announce();
  if (!raised.ok()) return raised;
  return dropped;
}

}  // namespace crumb::storage
