// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/ssd_tier.h"

#include <chrono>
#include <string>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/bounds.h"
#include "storage/ssd/index_budget.h"

namespace crumb::storage {

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
  if (folder->extent_bytes() + IndexBytes(options.bytes_max.value) > options.bytes_max.value) {
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
  tier->ShrinkIndex();
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
      slots_({.granule_bytes = folder_->alignment(), .page_bytes = folder_->alignment()}),
      table_(std::move(policy), slots_) {}

SsdTier::~SsdTier() {
  // An error costs the order in which pages were used, which no caller was promised.
  if (index_ != nullptr) Sync().IgnoreError();
}

// Reading.

std::vector<FragmentMeta> SsdTier::Find(const KeyspaceId& keyspace, const PageKey& key) const {
  std::vector<FragmentMeta> found;
  MutexLock lock(&mutex_);
  const PageHandle handle = table_.pages().Find(keyspace, key);
  if (handle == kNoPage) return found;
  const Page& page = table_[handle];
  for (const Fragment& fragment : page.fragments) found.push_back(page.MetaOf(fragment));
  return found;
}

absl::Status SsdTier::ReadFragment(const FragmentMeta& meta, const Slot& slot,
                                   std::span<std::byte> room) {
  if (cipher_ == nullptr) return files_->Read(slot.region, slot.offset, room, meta.bytes);
  std::vector<std::byte> sealed(StoredBytes(meta));
  CRUMB_RETURN_IF_ERROR(files_->Read(slot.region, slot.offset, sealed, sealed.size()));
  return cipher_->Unseal(meta, sealed, room.first(meta.bytes));
}

absl::Status SsdTier::Get(const FragmentMeta& wanted, std::span<std::byte> room) {
  CRUMB_RETURN_IF_ERROR(health_.Check(TierHealth::Operation::kRead));
  PageHandle handle;
  std::optional<Slot> slot;
  {
    MutexLock lock(&mutex_);
    handle = table_.pages().Find(wanted.keyspace, wanted.key);
    if (handle == kNoPage) return absl::NotFoundError("page is not on SSD");
    for (const Fragment& fragment : table_[handle].fragments) {
      if (table_[handle].MetaOf(fragment) == wanted) slot = fragment.slot;
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
    if (status.ok()) table_.CountGet(meta.logical_bytes(), meta.bytes);
    if (damaged && table_[page].resident) Hide(page, RemovalReason::kCorrupt);
    table_.Unref(page);
  }
  if (!damaged) return;
  verify_failures_.Add();
  LogWarning("SSD tier {}: page {} is dropped: {}", options_.path, meta.key.ToHex(),
             std::string(status.message()));
  // An error is no harm: a damaged page that a restart brings back fails the same check again.
  WriteIndex({}).IgnoreError();
  Announce();
}

void SsdTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  table_.order().BeginAccess();
  ++access_;
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    const PageHandle page = table_.pages().Find(keyspace, *key);
    if (page == kNoPage) continue;
    table_.order().Hit(page);
    table_.NoteRead({&page, 1}, now);
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
  while (!recency_dirty_.empty() && batch.changes.size() < kIndexBatchChangesMax) {
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
      if (batch.changes.empty() && leaving_.changes.changes.empty()) return absl::OkStatus();
    }
    CRUMB_RETURN_IF_ERROR(Writable());
    CRUMB_RETURN_IF_ERROR(WriteIndex(batch));
  }
}

uint32_t SsdTier::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until) {
  uint32_t found = 0;
  MutexLock lock(&mutex_);
  for (const PageKey& key : keys) {
    const PageHandle page = table_.pages().Find(keyspace, key);
    if (page == kNoPage) continue;
    table_[page].pinned_until = until;
    ++found;
  }
  return found;
}

uint64_t SsdTier::GenerationOf(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  return table_.pages().GenerationOf(keyspace);
}

uint64_t SsdTier::KeyspaceBytes(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  return table_.pages().BytesOf(keyspace);
}

uint64_t SsdTier::KeyspacePages(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  return table_.pages().PagesOf(keyspace);
}

void SsdTier::ForEachPage(const KeyspaceId& keyspace,
                          const std::function<void(const PageKey&)>& visit) const {
  constexpr size_t kScanPerHold = 4096;  // pages looked at before the lock is let go
  for (PageHandle next = 0; next != kNoPage;) {
    std::vector<PageKey> keys;
    {
      MutexLock lock(&mutex_);
      next = table_.pages().Scan(keyspace, next, kScanPerHold,
                                 [&](PageHandle, const Page& page) { keys.push_back(page.key); });
    }
    for (const PageKey& key : keys) visit(key);
  }
}

absl::Status SsdTier::PutRecord(const std::string& name, const std::string& value) {
  IndexBatch batch;
  if (value.empty()) {
    batch.Delete(RecordKey(name));
  } else {
    batch.Put(RecordKey(name), value);
  }
  CRUMB_RETURN_IF_ERROR(WriteIndex(batch));
  MutexLock lock(&mutex_);
  if (value.empty()) {
    records_.erase(name);
  } else {
    records_[name] = value;
  }
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
    const auto& notify = change.added ? events_.added : events_.removed;
    if (notify) notify(change.keyspace, change.key);
  }
}

}  // namespace crumb::storage
