// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/ssd_tier.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/coverage.h"
#include "storage/ssd/recovered_index.h"

namespace crumb::storage {
namespace {

// Sizes what a policy remembers of evicted pages; a page of a small model.
constexpr uint64_t kTypicalPageBytes = 256 << 10;
// A part of the budget belongs to the index: one in so many bytes, within bounds.
constexpr uint64_t kIndexPart = 32;
constexpr uint64_t kIndexBytesMin = uint64_t{6} << 20;
constexpr uint64_t kIndexBytesMax = uint64_t{64} << 20;
// An index that outgrows its part gets so many times its size: a compaction writes tables anew
// beside the old ones.
constexpr uint64_t kShareToGrow = 3;
constexpr uint64_t kShareToKeep = 2;
// Buffers of this part of its share keep RocksDB's log, tables and compactions inside.
constexpr uint64_t kBufferPart = 8;
constexpr uint64_t kBufferBytesMax = uint64_t{4} << 20;
// Changes of recency or removals in one index write: well below a buffer.
constexpr size_t kBatchChangesMax = 4096;
// Pages evicted at once, so that one index sync covers many, but never more than a part of all.
constexpr size_t kEvictPagesMax = 32;
constexpr size_t kEvictPart = 64;
constexpr Duration kGrowPause = std::chrono::seconds(10);

uint64_t IndexBase(uint64_t bytes_max) {
  return std::clamp(bytes_max / kIndexPart, kIndexBytesMin, kIndexBytesMax);
}

uint64_t BufferBytes(uint64_t bytes_max) {
  return std::min(IndexBase(bytes_max) / kBufferPart, kBufferBytesMax);
}

}  // namespace

absl::StatusOr<std::unique_ptr<FragmentTier>> SsdTier::Open(const SsdOptions& options,
                                                            const Clock& clock,
                                                            FragmentTierEvents events) {
  std::unique_ptr<PageCipher> cipher;
  std::optional<PageCipher::KeyCheck> key_check;
  if (!options.key_file.empty()) {
    CRUMB_ASSIGN_OR_RETURN(cipher, PageCipher::FromFile(options.key_file));
    key_check = cipher->key_check();
  }
  CRUMB_ASSIGN_OR_RETURN(auto folder, SsdFolder::Open(options, key_check));
  if (folder->extent_bytes() + IndexBase(options.bytes_max.value) > options.bytes_max.value) {
    return absl::FailedPreconditionError("ssd.bytes_max is too small for the extents of " +
                                         options.path + ": raise it or empty the folder");
  }
  CRUMB_ASSIGN_OR_RETURN(auto files, ExtentFiles::Open(*folder));
  const uint64_t pages = options.bytes_max.value / kTypicalPageBytes + 1;
  CRUMB_ASSIGN_OR_RETURN(auto policy, MakePolicy(options.policy, pages));
  std::unique_ptr<SsdTier> tier(new SsdTier(options, clock, std::move(events), std::move(cipher),
                                            std::move(folder), std::move(files),
                                            std::move(policy)));
  const auto begin = std::chrono::steady_clock::now();
  CRUMB_RETURN_IF_ERROR(tier->OpenIndex());
  CRUMB_RETURN_IF_ERROR(tier->Recover());
  tier->ShrinkToBudget();
  tier->recovery_.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  LogInfo("SSD tier {}: {} pages recovered, {} discarded", options.path, tier->recovery_.pages,
          tier->recovery_.discarded);
  return tier;
}

SsdTier::SsdTier(const SsdOptions& options, const Clock& clock, FragmentTierEvents events,
                 std::unique_ptr<PageCipher> cipher, std::unique_ptr<SsdFolder> folder,
                 std::unique_ptr<ExtentFiles> files, std::unique_ptr<EvictionPolicy> policy)
    : options_(options),
      clock_(clock),
      events_(std::move(events)),
      cipher_(std::move(cipher)),
      folder_(std::move(folder)),
      files_(std::move(files)),
      health_("SSD tier", clock),
      table_(std::move(policy), folder_->alignment()) {}

SsdTier::~SsdTier() {
  if (index_ != nullptr) Sync().IgnoreError();
}

// Recovery.

absl::Status SsdTier::OpenIndex() {
  const uint64_t buffer_bytes = BufferBytes(options_.bytes_max.value);
  absl::StatusOr<std::unique_ptr<SsdIndex>> index =
      SsdIndex::Open(folder_->index_path(), buffer_bytes);
  if (absl::IsDataLoss(index.status())) return BeginAnew(index.status());
  CRUMB_RETURN_IF_ERROR(index.status());
  index_ = std::move(*index);
  return absl::OkStatus();
}

// Pages whose entries cannot be read are lost; what the server recorded is kept as far as possible.
absl::Status SsdTier::BeginAnew(const absl::Status& damage) {
  LogError("SSD tier {}: {}; the index is set aside and the tier starts empty", options_.path,
           std::string(damage.message()));
  IndexBatch kept;
  const auto keep = [&](std::string_view key, std::string_view value) {
    kept.Put(std::string(key), std::string(value));
  };
  if (index_ != nullptr) {
    index_->ForEach(IndexKind::kGeneration, keep).IgnoreError();
    index_->ForEach(IndexKind::kRecord, keep).IgnoreError();
    index_.reset();
  }
  CRUMB_RETURN_IF_ERROR(folder_->SetIndexAside(IndexBase(options_.bytes_max.value) / kBufferPart));
  CRUMB_ASSIGN_OR_RETURN(
      index_, SsdIndex::Open(folder_->index_path(), BufferBytes(options_.bytes_max.value)));
  return index_->Write(kept);
}

absl::Status SsdTier::Recover() {
  absl::StatusOr<RecoveredIndex> recovered = ReadIndex(*index_);
  if (absl::IsDataLoss(recovered.status())) {
    CRUMB_RETURN_IF_ERROR(BeginAnew(recovered.status()));
    recovered = ReadIndex(*index_);
  }
  CRUMB_RETURN_IF_ERROR(recovered.status());
  CRUMB_RETURN_IF_ERROR(index_->StartWriting());
  IndexBatch discarded = std::move(recovered->damaged);
  TakeBack(*std::move(recovered), &discarded);
  recovery_.discarded = discarded.changes.size();
  // In pieces, for the log must stay small.
  for (size_t begin = 0; begin < discarded.changes.size(); begin += kBatchChangesMax) {
    const auto from = discarded.changes.begin() + static_cast<ptrdiff_t>(begin);
    const size_t size = std::min(kBatchChangesMax, discarded.changes.size() - begin);
    const IndexBatch piece{{from, from + static_cast<ptrdiff_t>(size)}};
    if (absl::Status status = index_->Write(piece); !status.ok()) {
      health_.Failed(TierHealth::Operation::kWrite, status);
      break;
    }
  }
  return absl::OkStatus();
}

void SsdTier::TakeBack(RecoveredIndex recovered, IndexBatch* discarded) {
  SortByRecency(recovered.accesses, &recovered.entries);
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  records_ = std::move(recovered.records);
  for (const auto& [keyspace, generation] : recovered.generations) {
    table_.RaiseGeneration(keyspace, generation);
  }
  for (const ExtentFiles::Extent& extent : files_->found()) {
    table_.slots().AddRegion(extent.number, extent.bytes);
  }
  uint64_t at_access = 0;
  for (const IndexEntry& entry : recovered.entries) {
    const auto access = recovered.accesses.find({entry.meta.keyspace, entry.meta.key});
    if (access != recovered.accesses.end()) access_ = access->second;
    if (access_ != at_access) table_.BeginAccess();
    at_access = access_;
    if (!TakeBack(entry, now)) {
      discarded->Delete(FragmentKey(entry.meta.keyspace, entry.meta.key, entry.meta.range));
    }
  }
  for (const auto& [name, access] : recovered.accesses) {
    access_ = std::max(access_, access);
    if (table_.Find(name.first, name.second) == kNoPage) {
      discarded->Delete(AccessKey(name.first, name.second));
    }
  }
  recovery_.pages = table_.Stats().pages;
  table_.TakeChanges();
}

bool SsdTier::TakeBack(const IndexEntry& entry, TimePoint now) {
  const auto extent =
      std::find_if(files_->found().begin(), files_->found().end(),
                   [&](const auto& found) { return found.number == entry.slot.region; });
  if (extent == files_->found().end() ||
      entry.slot.offset + entry.slot.bytes > extent->intact_bytes ||
      !table_.slots().Claim(entry.slot, SlotAllocator::kNoOwner)) {
    return false;
  }
  const absl::StatusOr<PageHandle> page =
      table_.Insert(entry.meta, entry.slot, Below::kStored, now);
  if (!page.ok()) {
    table_.slots().Free(entry.slot);
    return false;
  }
  table_[*page].access = access_;
  return true;
}

// Writing.

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
      const PageHandle page = table_.Find(fragment.meta.keyspace, fragment.meta.key);
      if (page == kNoPage || table_[page].generation >= fragment.meta.generation) continue;
      Hide(page, RemovalReason::kDeleted);
      found = true;
    }
  }
  if (found) WriteIndex({}).IgnoreError();  // health has noted it
}

void SsdTier::FindRoom(std::span<const Incoming> earlier, Incoming& incoming) {
  const FragmentMeta& meta = incoming.write->meta;
  for (const Incoming& one : earlier) {
    const FragmentMeta& other = one.write->meta;
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
    {
      MutexLock lock(&mutex_);
      incoming.status = table_.CanInsert(meta);
      if (!incoming.status.ok()) return;
      incoming.slot = table_.slots().Allocate(bytes, SlotAllocator::kNoOwner);
      if (incoming.slot) return;
    }
    if (Grow()) continue;
    incoming.status = EvictFor(bytes);
    if (!incoming.status.ok()) return;
  }
}

void SsdTier::WriteBytes(std::span<Incoming> incoming) {
  std::set<uint32_t> extents;
  absl::Status status;
  for (Incoming& one : incoming) {
    if (!one.slot || !status.ok()) continue;
    status = WriteFragment(*one.write, *one.slot);
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
    table_.slots().Free(*one.slot);  // no entry names it
    one.slot.reset();
    one.status = absl::UnavailableError(status.message());
  }
}

uint64_t SsdTier::StoredBytes(const FragmentMeta& meta) const {
  return meta.bytes + (cipher_ != nullptr ? PageCipher::kSealBytes : 0);
}

absl::Status SsdTier::WriteFragment(const FragmentWrite& write, const Slot& slot) {
  if (cipher_ == nullptr) {
    return files_->Write(slot.region, slot.offset, write.room, write.meta.bytes);
  }
  std::vector<std::byte> sealed(StoredBytes(write.meta));
  CRUMB_RETURN_IF_ERROR(cipher_->Seal(write.meta, write.room.first(write.meta.bytes), sealed));
  return files_->Write(slot.region, slot.offset, sealed, sealed.size());
}

absl::Status SsdTier::ReadFragment(const FragmentMeta& meta, const Slot& slot,
                                   std::span<std::byte> room) {
  if (cipher_ == nullptr) return files_->Read(slot.region, slot.offset, room, meta.bytes);
  std::vector<std::byte> sealed(StoredBytes(meta));
  CRUMB_RETURN_IF_ERROR(files_->Read(slot.region, slot.offset, sealed, sealed.size()));
  return cipher_->Unseal(meta, sealed, room.first(meta.bytes));
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
  // Nobody knows whether these entries will be there after a restart: they must go before their
  // slots are used again.
  MutexLock lock(&mutex_);
  for (Incoming& one : incoming) {
    if (one.slot) GiveUp(one, absl::UnavailableError(status.message()));
  }
}

void SsdTier::GiveUp(Incoming& incoming, const absl::Status& status) {
  const FragmentMeta& meta = incoming.write->meta;
  leaving_.deletes.Delete(FragmentKey(meta.keyspace, meta.key, meta.range));
  leaving_.slots.push_back(*incoming.slot);
  incoming.slot.reset();
  incoming.status = status;
}

void SsdTier::Show(std::span<Incoming> incoming) {
  const TimePoint now = clock_.Now();
  bool written = false;
  MutexLock lock(&mutex_);
  table_.BeginAccess();
  for (Incoming& one : incoming) {
    if (!one.slot) continue;
    written = true;
    const FragmentMeta& meta = one.write->meta;
    const absl::StatusOr<PageHandle> page = table_.Insert(meta, *one.slot, Below::kStored, now);
    if (!page.ok()) {
      GiveUp(one, page.status());
      continue;
    }
    table_[*page].access = access_;
    table_.CountPut(meta);
  }
  if (written) health_.Succeeded(TierHealth::Operation::kWrite);
}

// Room.

uint64_t SsdTier::IndexShare(uint64_t factor) const {
  return std::max(IndexBase(options_.bytes_max.value), factor * folder_->BytesBesidesExtents());
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
  if (status.ok()) table_.slots().AddRegion(number, folder_->extent_bytes());
  return status.ok();
}

absl::Status SsdTier::EvictFor(uint64_t bytes) {
  const TimePoint now = clock_.Now();
  size_t evicted = 0;
  {
    MutexLock lock(&mutex_);
    const size_t wanted = std::clamp<size_t>(table_.Stats().pages / kEvictPart, 1, kEvictPagesMax);
    while (evicted < wanted) {
      const auto victim = table_.Victim(now, [](const Page&) { return true; });
      if (!victim) break;
      Hide(*victim, RemovalReason::kCapacity);
      ++evicted;
    }
    for (const PageHandle page : table_.slots().OwnersOfNearlyEmptyChunk(bytes)) {
      const Page& owner = table_[page];
      if (!owner.resident || owner.references > 0 || owner.pinned_until > now) continue;
      Hide(page, RemovalReason::kCapacity);
      ++evicted;
    }
  }
  if (evicted == 0) return absl::UnavailableError("SSD tier has no room: every page is in use");
  return WriteIndex({});
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
    emptiest = table_.slots().EmptiestRegion();
    if (!emptiest) return false;
    for (const PageHandle page : table_.slots().OwnersIn(*emptiest)) {
      if (table_[page].resident) Hide(page, RemovalReason::kCapacity);
    }
  }
  if (!WriteIndex({}).ok()) return false;
  {
    MutexLock lock(&mutex_);
    if (!table_.slots().RemoveRegion(*emptiest)) return false;  // somebody still reads there
  }
  const absl::Status status = files_->Remove(*emptiest);
  if (!status.ok()) health_.Failed(TierHealth::Operation::kWrite, status);
  return status.ok();
}

// Leaving.

void SsdTier::Hide(PageHandle page, RemovalReason reason) {
  const Page& leaving = table_[page];
  for (const Fragment& fragment : leaving.fragments) {
    leaving_.deletes.Delete(FragmentKey(leaving.keyspace, leaving.key, fragment.range));
  }
  leaving_.deletes.Delete(AccessKey(leaving.keyspace, leaving.key));
  leaving_.pages.push_back(page);
  table_.Ref(page);
  table_.Remove(page, reason, clock_.Now());
}

absl::Status SsdTier::WriteIndex(const IndexBatch& batch) {
  Leaving leaving;
  {
    MutexLock lock(&mutex_);
    while (index_busy_) index_free_.Wait(&mutex_);
    // Another call's write may have taken along what this one is for.
    if (batch.changes.empty() && leaving_.deletes.changes.empty()) return absl::OkStatus();
    index_busy_ = true;
    std::swap(leaving, leaving_);
  }
  IndexBatch all = leaving.deletes;
  all.changes.insert(all.changes.end(), batch.changes.begin(), batch.changes.end());
  const absl::Status status = index_->Write(all);
  if (!status.ok()) health_.Failed(TierHealth::Operation::kWrite, status);
  MutexLock lock(&mutex_);
  index_busy_ = false;
  index_free_.NotifyAll();  // one that finds nothing left to do wakes nobody
  if (status.ok()) {
    for (const Slot& slot : leaving.slots) table_.slots().Free(slot);
    for (const PageHandle page : leaving.pages) table_.Unref(page);
    return status;
  }
  // Back in front, for what follows may be about the same pages.
  const auto prepend = [](auto& to, const auto& from) {
    to.insert(to.begin(), from.begin(), from.end());
  };
  prepend(leaving_.deletes.changes, leaving.deletes.changes);
  prepend(leaving_.slots, leaving.slots);
  prepend(leaving_.pages, leaving.pages);
  return absl::UnavailableError(status.message());
}

uint32_t SsdTier::Remove(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  uint32_t removed = 0;
  {
    MutexLock lock(&mutex_);
    WaitForPut();
    for (const PageKey& key : keys) {
      const PageHandle page = table_.Find(keyspace, key);
      if (page == kNoPage) continue;
      Hide(page, RemovalReason::kDeleted);
      ++removed;
    }
  }
  if (removed > 0) WriteIndex({}).IgnoreError();  // health has noted it, a later write repeats it
  Announce();
  return removed;
}

uint64_t SsdTier::Drop(const KeyspaceId& keyspace, uint64_t generation) {
  IndexBatch batch;
  batch.Put(GenerationKey(keyspace), EncodeNumber(generation));
  {
    MutexLock lock(&mutex_);
    if (table_.GenerationOf(keyspace) >= generation) return 0;
    table_.RaiseGeneration(keyspace, generation);
  }
  // With the generation durable, no page below it comes back, whatever happens to the deletes.
  WriteIndex(batch).IgnoreError();
  uint64_t dropped = 0;
  while (true) {
    {
      MutexLock lock(&mutex_);
      WaitForPut();
      const std::vector<PageHandle> pages = table_.PagesBelow(keyspace, generation);
      if (pages.empty()) break;
      const size_t count = std::min(pages.size(), kBatchChangesMax);
      for (size_t i = 0; i < count; ++i) Hide(pages[i], RemovalReason::kDeleted);
      dropped += count;
    }
    WriteIndex({}).IgnoreError();
  }
  Announce();
  return dropped;
}

// Reading.

std::vector<FragmentMeta> SsdTier::Find(const KeyspaceId& keyspace, const PageKey& key) const {
  std::vector<FragmentMeta> found;
  MutexLock lock(&mutex_);
  const PageHandle handle = table_.Find(keyspace, key);
  if (handle == kNoPage) return found;
  const Page& page = table_[handle];
  for (const Fragment& fragment : page.fragments) found.push_back(table_.MetaOf(page, fragment));
  return found;
}

absl::Status SsdTier::Get(const FragmentMeta& wanted, std::span<std::byte> room) {
  CRUMB_RETURN_IF_ERROR(health_.Check(TierHealth::Operation::kRead));
  PageHandle handle;
  std::optional<Slot> slot;
  {
    MutexLock lock(&mutex_);
    handle = table_.Find(wanted.keyspace, wanted.key);
    if (handle == kNoPage) return absl::NotFoundError("page is not on SSD");
    for (const Fragment& fragment : table_[handle].fragments) {
      if (table_.MetaOf(table_[handle], fragment) == wanted) slot = fragment.slot;
    }
    if (!slot) return absl::NotFoundError("fragment is not on SSD");
    table_.Ref(handle);
  }
  absl::Status status = ReadFragment(wanted, *slot, room);
  if (status.ok()) {
    status = VerifyFragment(wanted, room);
    health_.Succeeded(TierHealth::Operation::kRead);
  } else if (!absl::IsDataLoss(status)) {
    health_.Failed(TierHealth::Operation::kRead, status);
    status = absl::UnavailableError(status.message());
  }
  FinishGet(wanted, handle, status);
  return status;
}

void SsdTier::FinishGet(const FragmentMeta& meta, PageHandle page, const absl::Status& status) {
  const bool damaged = !status.ok() && !absl::IsUnavailable(status);
  {
    MutexLock lock(&mutex_);
    if (status.ok()) table_.CountGet(meta);
    if (damaged && table_[page].resident) Hide(page, RemovalReason::kCorrupt);
    table_.Unref(page);
  }
  if (!damaged) return;
  verify_failures_.Add();
  LogWarning("SSD tier {}: page {} is dropped: {}", options_.path, meta.key.ToHex(),
             std::string(status.message()));
  WriteIndex({}).IgnoreError();
  Announce();
}

void SsdTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  table_.BeginAccess();
  ++access_;
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    const PageHandle page = table_.Find(keyspace, *key);
    if (page == kNoPage) continue;
    table_.Hit(page);
    table_.NoteRead(page, now);
    MarkUsed(page);
  }
}

void SsdTier::MarkUsed(PageHandle handle) {
  Page& page = table_[handle];
  page.access = access_;
  if (!page.recency_dirty) recency_dirty_.push_back(handle);
  page.recency_dirty = true;
}

IndexBatch SsdTier::TakeRecency() {
  IndexBatch batch;
  while (!recency_dirty_.empty() && batch.changes.size() < kBatchChangesMax) {
    Page& page = table_[recency_dirty_.back()];
    recency_dirty_.pop_back();
    if (!page.resident || !page.recency_dirty) continue;  // gone, or another page by now
    page.recency_dirty = false;
    batch.Put(AccessKey(page.keyspace, page.key), EncodeNumber(page.access));
  }
  return batch;
}

absl::Status SsdTier::Sync() {
  while (true) {
    IndexBatch batch;
    {
      MutexLock lock(&mutex_);
      batch = TakeRecency();
      if (batch.changes.empty() && leaving_.deletes.changes.empty()) return absl::OkStatus();
    }
    CRUMB_RETURN_IF_ERROR(Writable());
    CRUMB_RETURN_IF_ERROR(WriteIndex(batch));
  }
}

uint32_t SsdTier::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until) {
  uint32_t found = 0;
  MutexLock lock(&mutex_);
  for (const PageKey& key : keys) {
    const PageHandle page = table_.Find(keyspace, key);
    if (page == kNoPage) continue;
    table_[page].pinned_until = until;
    ++found;
  }
  return found;
}

uint64_t SsdTier::GenerationOf(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  return table_.GenerationOf(keyspace);
}

uint64_t SsdTier::KeyspaceBytes(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  return table_.BytesOf(keyspace);
}

void SsdTier::ForEachPage(const KeyspaceId& keyspace,
                          const std::function<void(const PageKey&)>& visit) const {
  std::vector<PageKey> keys;
  {
    MutexLock lock(&mutex_);
    table_.ForEachPage(keyspace, [&](const Page& page) { keys.push_back(page.key); });
  }
  for (const PageKey& key : keys) visit(key);
}

absl::Status SsdTier::PutRecord(const std::string& name, const std::string& value) {
  IndexBatch batch;
  batch.Put(RecordKey(name), value);
  CRUMB_RETURN_IF_ERROR(WriteIndex(batch));
  MutexLock lock(&mutex_);
  records_[name] = value;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> SsdTier::Records() const {
  MutexLock lock(&mutex_);
  return std::vector<std::pair<std::string, std::string>>(records_.begin(), records_.end());
}

absl::Status SsdTier::Writable() const { return health_.Check(TierHealth::Operation::kWrite); }

void SsdTier::AddStats(StoreStats& stats) const {
  {
    MutexLock lock(&mutex_);
    stats.ssd = table_.Stats();
  }
  stats.ssd.capacity_bytes = options_.bytes_max.value - IndexShare(1);
  stats.ssd.state = health_.State();
  stats.verify_failures_ssd = verify_failures_.value();
  stats.recovered_pages = recovery_.pages;
  stats.discarded_pages = recovery_.discarded;
  stats.recovery_seconds = recovery_.seconds;
}

void SsdTier::Announce() {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    changes = table_.TakeChanges();
  }
  for (const PageTable::Change& change : changes) {
    const auto& tell = change.added ? events_.added : events_.removed;
    if (tell) tell(change.keyspace, change.key);
  }
}

}  // namespace crumb::storage
