// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/ssd_tier.h"

// The stages of Put: room, bytes, a sync, index entries, and then pages in sight.

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "storage/coverage.h"

namespace crumb::storage {

std::vector<absl::Status> SsdTier::Put(std::span<const FragmentWrite> fragments) {
  const absl::Status writable = Writable();
  if (!writable.ok()) return std::vector<absl::Status>(fragments.size(), writable);
  BeginPut();
  RemoveOlderGenerations(fragments);
  std::vector<Incoming> incoming(fragments.size());
  for (size_t i = 0; i < fragments.size(); ++i) {
    incoming[i].write = &fragments[i];
    FindRoom(std::span(incoming).first(i), incoming[i]);
  }
  WriteBytes(incoming);
  WriteEntries(incoming);
  Show(incoming);
  EndPut();
  ShrinkToBudget();
  Announce();
  std::vector<absl::Status> statuses;
  statuses.reserve(incoming.size());
  for (Incoming& one : incoming) statuses.push_back(std::move(one.status));
  return statuses;
}

void SsdTier::BeginPut() {
  MutexLock lock(&mutex_);
  while (putting_) put_ended_.Wait(&mutex_);
  putting_ = true;
}

void SsdTier::EndPut() {
  MutexLock lock(&mutex_);
  putting_ = false;
  ++puts_ended_;
  put_ended_.NotifyAll();
}

// Waits for the end of a Put under way, not for others that begin meanwhile.
void SsdTier::WaitForPut() {
  const uint64_t ended = puts_ended_;
  while (putting_ && puts_ended_ == ended) put_ended_.Wait(&mutex_);
}

// An older page must be out of the index first: its entries may have other keys than the new ones.
void SsdTier::RemoveOlderGenerations(std::span<const FragmentWrite> fragments) {
  bool found = false;
  {
    MutexLock lock(&mutex_);
    for (const FragmentWrite& fragment : fragments) {
      const PageHandle page = table_.pages().Find(fragment.meta.keyspace, fragment.meta.key);
      if (page == kNoPage || table_[page].generation >= fragment.meta.generation) continue;
      Hide(page, RemovalReason::kDeleted);
      found = true;
    }
  }
  // An error is no loss: the deletes go, in front, into the same index write as the new entries.
  if (found) WriteIndex({}).IgnoreError();
}

void SsdTier::FindRoom(std::span<const Incoming> earlier, Incoming& incoming) {
  const FragmentMeta& meta = incoming.write->meta;
  size_t on_their_way = 0;
  for (const Incoming& one : earlier) {
    const FragmentMeta& other = one.write->meta;
    if (one.slot) ++on_their_way;
    if (one.slot && other.keyspace == meta.keyspace && other.key == meta.key &&
        Overlaps(other.range, meta.range)) {
      incoming.status = absl::AlreadyExistsError("the batch has tiles of the fragment twice");
      return;
    }
  }
  const uint64_t bytes = StoredBytes(meta);
  if (bytes > folder_->extent_bytes()) {
    incoming.status = absl::ResourceExhaustedError("fragment is larger than an extent");
    return;
  }
  while (true) {
    bool index_is_full = false;
    {
      MutexLock lock(&mutex_);
      incoming.status = table_.CanInsert(meta);
      if (!incoming.status.ok()) return;
      index_is_full = IndexIsFull(on_their_way);
      if (!index_is_full) incoming.slot = slots_.Allocate(bytes, SlotAllocator::kNoOwner);
      if (incoming.slot) return;
    }
    if (!index_is_full && Grow()) continue;
    incoming.status = EvictFor(bytes);
    if (!incoming.status.ok()) return;
  }
}

void SsdTier::WriteBytes(std::span<Incoming> incoming) {
  std::set<uint32_t> extents;
  absl::Status status;
  for (Incoming& one : incoming) {
    if (!one.slot || !status.ok()) continue;
    const FragmentMeta& meta = one.write->meta;
    std::span<const std::byte> stored = one.write->room;
    std::vector<std::byte> sealed;
    if (cipher_ != nullptr) {
      sealed.resize(StoredBytes(meta));
      status = cipher_->Seal(meta, stored.first(meta.bytes), sealed);
      stored = sealed;
    }
    if (status.ok()) {
      status = files_->Write(one.slot->region, one.slot->offset, stored, StoredBytes(meta));
    }
    extents.insert(one.slot->region);
  }
  for (const uint32_t extent : extents) {
    if (status.ok()) status = files_->Sync(extent);
  }
  if (status.ok()) return;
  health_.Failed(TierHealth::Operation::kWrite, status);
  MutexLock lock(&mutex_);
  for (Incoming& one : incoming) {
    if (!one.slot) continue;
    slots_.Free(*one.slot);  // no entry names it
    one.slot.reset();
    one.status = absl::UnavailableError(status.message());
  }
}

uint64_t SsdTier::StoredBytes(const FragmentMeta& meta) const {
  return meta.bytes + (cipher_ != nullptr ? PageCipher::kSealBytes : 0);
}

void SsdTier::WriteEntries(std::span<Incoming> incoming) {
  IndexBatch batch;
  {
    MutexLock lock(&mutex_);
    ++access_;
    batch = TakeRecency();
    for (const Incoming& one : incoming) {
      if (!one.slot) continue;
      const FragmentMeta& meta = one.write->meta;
      batch.Put(FragmentKey(meta.keyspace, meta.key, meta.range),
                EncodeIndexEntry({meta, *one.slot}));
      batch.Put(AccessKey(meta.keyspace, meta.key), EncodeNumber(access_));
    }
  }
  const absl::Status status = WriteIndex(batch);
  if (status.ok()) return;
  // These entries may or may not be there after a restart: they must go before their slots are used
  // again.
  MutexLock lock(&mutex_);
  for (Incoming& one : incoming) {
    if (one.slot) GiveUp(one, absl::UnavailableError(status.message()));
  }
}

void SsdTier::GiveUp(Incoming& incoming, const absl::Status& status) {
  const FragmentMeta& meta = incoming.write->meta;
  leaving_.changes.Delete(FragmentKey(meta.keyspace, meta.key, meta.range));
  leaving_.slots.push_back(*incoming.slot);
  incoming.slot.reset();
  incoming.status = status;
}

void SsdTier::Show(std::span<Incoming> incoming) {
  const TimePoint now = clock_.Now();
  bool written = false;
  MutexLock lock(&mutex_);
  table_.order().BeginAccess();
  for (Incoming& one : incoming) {
    if (!one.slot) continue;
    written = true;
    const FragmentMeta& meta = one.write->meta;
    const absl::StatusOr<PageHandle> page =
        table_.Insert(meta, *one.slot, Below::kStored, /*owed=*/false, now);
    if (!page.ok()) {
      GiveUp(one, page.status());
      continue;
    }
    table_[*page].access = access_;
    table_.CountPut(meta);
  }
  if (written) health_.Succeeded(TierHealth::Operation::kWrite);
}

}  // namespace crumb::storage
