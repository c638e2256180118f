// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/ssd_tier.h"

// Recovery: how a tier takes back the pages in its folder.

#include <algorithm>
#include <string>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/ssd/index_budget.h"
#include "storage/ssd/recovered_index.h"

namespace crumb::storage {

absl::Status SsdTier::OpenIndex() {
  const uint64_t buffer_bytes = IndexBufferBytes(options_.bytes_max.value);
  absl::StatusOr<std::unique_ptr<SsdIndex>> index =
      SsdIndex::Open(folder_->index_path(), buffer_bytes);
  if (absl::IsDataLoss(index.status())) return StartEmptyIndex(index.status());
  CRUMB_RETURN_IF_ERROR(index.status());
  index_ = std::move(*index);
  return absl::OkStatus();
}

// Pages whose entries cannot be read are lost; the server's own records are kept as far as
// possible.
absl::Status SsdTier::StartEmptyIndex(const absl::Status& damage) {
  LogError("SSD tier {}: {}; the index is set aside and the tier starts empty", options_.path,
           std::string(damage.message()));
  IndexBatch kept;
  const auto keep = [&](std::string_view key, std::string_view value) {
    kept.Put(std::string(key), std::string(value));
  };
  if (index_ != nullptr) {
    // Entries that cannot be read are lost with their pages: the new index has none.
    index_->ForEach(IndexKind::kGeneration, keep).IgnoreError();
    index_->ForEach(IndexKind::kRecord, keep).IgnoreError();
    index_.reset();
  }
  CRUMB_RETURN_IF_ERROR(
      folder_->SetIndexAside(IndexBytes(options_.bytes_max.value) / kIndexBufferPart));
  CRUMB_ASSIGN_OR_RETURN(
      index_, SsdIndex::Open(folder_->index_path(), IndexBufferBytes(options_.bytes_max.value)));
  return index_->Write(kept);
}

absl::Status SsdTier::Recover() {
  absl::StatusOr<RecoveredIndex> recovered = ReadIndex(*index_);
  if (absl::IsDataLoss(recovered.status())) {
    CRUMB_RETURN_IF_ERROR(StartEmptyIndex(recovered.status()));
    recovered = ReadIndex(*index_);
  }
  CRUMB_RETURN_IF_ERROR(recovered.status());
  CRUMB_RETURN_IF_ERROR(index_->StartWriting());
  if (!index_->writable().ok()) health_.Failed(TierHealth::Operation::kWrite, index_->writable());
  IndexBatch discarded = std::move(recovered->damaged);
  TakeBack(*std::move(recovered), &discarded);
  recovery_.discarded = discarded.changes.size();
  // In pieces, for the log must stay small.
  for (size_t begin = 0; begin < discarded.changes.size(); begin += kIndexBatchChangesMax) {
    const auto from = discarded.changes.begin() + static_cast<ptrdiff_t>(begin);
    const size_t size = std::min(kIndexBatchChangesMax, discarded.changes.size() - begin);
    const IndexBatch piece{{from, from + static_cast<ptrdiff_t>(size)}};
    if (absl::Status status = index_->Write(piece); !status.ok()) {
      health_.Failed(TierHealth::Operation::kWrite, status);
      // Their slots count as free, so they must be gone before an entry names one of these slots
      // again: after the next restart the older entry would win. The next index write takes them.
      MutexLock lock(&mutex_);
      leaving_.changes.changes.assign(from, discarded.changes.end());
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
    slots_.AddRegion(extent.number, extent.bytes);
  }
  uint64_t at_access = 0;
  for (const IndexEntry& entry : recovered.entries) {
    const auto access = recovered.accesses.find({entry.meta.keyspace, entry.meta.key});
    if (access != recovered.accesses.end()) access_ = access->second;
    if (access_ != at_access) table_.order().BeginAccess();
    at_access = access_;
    if (!TakeBack(entry, now)) {
      discarded->Delete(FragmentKey(entry.meta.keyspace, entry.meta.key, entry.meta.range));
    }
  }
  for (const auto& [name, access] : recovered.accesses) {
    access_ = std::max(access_, access);
    if (table_.pages().Find(name.first, name.second) == kNoPage) {
      discarded->Delete(AccessKey(name.first, name.second));
    }
  }
  recovery_.pages = table_.Stats().pages;
  table_.TakeChanges();
}

bool SsdTier::IsIntact(const IndexEntry& entry) const {
  const ExtentFiles::Extent* const extent = files_->FindFound(entry.slot.region);
  // Differences, for the sum of offset and size may wrap.
  return extent != nullptr && entry.slot.offset <= extent->intact_bytes &&
         entry.slot.bytes <= extent->intact_bytes - entry.slot.offset &&
         StoredBytes(entry.meta) <= entry.slot.bytes;
}

bool SsdTier::TakeBack(const IndexEntry& entry, TimePoint now) {
  if (!IsIntact(entry) || !slots_.Claim(entry.slot, SlotAllocator::kNoOwner)) return false;
  const absl::StatusOr<PageHandle> page =
      table_.Insert(entry.meta, entry.slot, Below::kStored, /*owed=*/false, now);
  if (!page.ok()) {
    slots_.Free(entry.slot);
    return false;
  }
  table_[*page].access = access_;
  return true;
}

}  // namespace crumb::storage
