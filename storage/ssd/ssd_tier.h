// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/metrics.h"
#include "common/mutex.h"
#include "storage/fragment_tier.h"
#include "storage/index/page_table.h"
#include "storage/slot_allocator.h"
#include "storage/ssd/extent_files.h"
#include "storage/ssd/index_format.h"
#include "storage/ssd/page_cipher.h"
#include "storage/ssd/recovered_index.h"
#include "storage/ssd/ssd_folder.h"
#include "storage/ssd/ssd_index.h"
#include "storage/ssd/tier_health.h"
#include "storage/store_options.h"

namespace crumb::storage {

// Fragments in slots of extent files, found through an index that follows their bytes:
// docs/formats/ssd-folder.md. All files of the folder together stay within the budget at every
// moment. Thread-safe; its lock is never held over a transfer.
class SsdTier final : public FragmentTier {
 public:
  // Opens or creates the folder and recovers the durable pages. If the index is damaged, it is set
  // aside, and the tier starts empty. Errors are those of TieredStore::Open.
  static absl::StatusOr<std::unique_ptr<FragmentTier>> Open(const SsdOptions& options,
                                                            const Clock& clock,
                                                            FragmentTierEvents events);
  // Makes recency durable.
  ~SsdTier() override;

  std::vector<absl::Status> Put(std::span<const FragmentWrite> fragments) override;
  std::vector<FragmentMeta> Find(const KeyspaceId& keyspace, const PageKey& key) const override;
  absl::Status Get(const FragmentMeta& fragment, std::span<std::byte> room) override;
  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) override;
  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until) override;
  absl::StatusOr<uint32_t> Remove(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override;
  absl::StatusOr<uint64_t> Drop(const KeyspaceId& keyspace, uint64_t generation) override;
  uint64_t GenerationOf(const KeyspaceId& keyspace) const override;
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override;
  uint64_t KeyspacePages(const KeyspaceId& keyspace) const override;
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const override;
  absl::Status PutRecord(const std::string& name, const std::string& value) override;
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() const override;
  absl::Status Sync() override;
  absl::Status Writable() const override;
  void AddStats(StoreStats& stats) const override;

 private:
  // One fragment of a Put on its way.
  struct Incoming {
    const FragmentWrite* write = nullptr;
    std::optional<Slot> slot;
    absl::Status status;
  };
  // Changes that delete index entries. Slots of these entries may be used again only after the
  // changes are durable. Every index write includes them, until one succeeds.
  struct Leaving {
    IndexBatch changes;  // deletes, and generations of dropped keyspaces
    std::vector<Slot> slots;
    std::vector<PageHandle> pages;  // referred to
  };
  // Writes the changes of `leaving` in order and in pieces, the last one together with `batch`. On
  // an error the changes that were not written are left.
  absl::Status WriteLeaving(Leaving& leaving, const IndexBatch& batch);
  struct Recovery {
    uint64_t pages = 0;
    uint64_t discarded = 0;
    double seconds = 0;
  };
  SsdTier(const SsdOptions& options, const Clock& clock, FragmentTierEvents events,
          std::unique_ptr<PageCipher> cipher, std::unique_ptr<SsdFolder> folder,
          std::unique_ptr<ExtentFiles> files, std::unique_ptr<EvictionPolicy> policy);

  absl::Status OpenIndex();
  absl::Status Recover();
  // Sets a damaged index aside and opens an empty one; `damage` is logged.
  absl::Status StartEmptyIndex(const absl::Status& damage);
  // Compares entries with extents and generations, and takes back those that agree with them.
  void TakeBack(RecoveredIndex recovered, IndexBatch* discarded);
  bool TakeBack(const IndexEntry& entry, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the slot lies within an extent's intact bytes and has room for the fragment.
  bool IsIntact(const IndexEntry& entry) const;

  // The stages of Put.
  void BeginPut();
  void EndPut();
  void RemoveOlderGenerations(std::span<const FragmentWrite> fragments);
  void FindRoom(std::span<const Incoming> earlier, Incoming& incoming);
  void WriteBytes(std::span<Incoming> incoming);
  absl::Status ReadFragment(const FragmentMeta& meta, const Slot& slot, std::span<std::byte> room);
  void WriteEntries(std::span<Incoming> incoming);
  void Show(std::span<Incoming> incoming);
  void GiveUp(Incoming& incoming, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Room.
  uint64_t StoredBytes(const FragmentMeta& meta) const;
  uint64_t IndexShare(uint64_t factor) const;
  bool Grow();
  // Whether the index may have no further fragment beside `more` that are on their way.
  bool IndexIsFull(size_t more) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes pages out of sight in the policy's order, and returns how many.
  size_t HideVictims(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EvictFor(uint64_t bytes);
  void ShrinkToBudget();
  void ShrinkIndex();
  bool RemoveAnExtent();

  // Makes `batch` durable, after all that is leaving, whose slots are free then. In turn: a page
  // that leaves and comes again must do so in this order.
  absl::Status WriteIndex(const IndexBatch& batch);
  // Takes a page out of sight; its slots stay taken until the index has forgotten it.
  void Hide(PageHandle page, RemovalReason reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishGet(const FragmentMeta& meta, PageHandle page, const absl::Status& status);
  void WaitForPut() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  IndexBatch TakeRecency() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MarkUsed(PageHandle page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Announce();

  const SsdOptions options_;
  const Clock& clock_;
  const FragmentTierEvents events_;
  const std::unique_ptr<PageCipher> cipher_;  // null: pages are stored as they are
  const std::unique_ptr<SsdFolder> folder_;
  const std::unique_ptr<ExtentFiles> files_;
  std::unique_ptr<SsdIndex> index_;
  TierHealth health_;
  Counter verify_failures_;
  Recovery recovery_;  // set before others see the tier

  mutable Mutex mutex_;
  CondVar put_ended_;
  CondVar index_free_;
  SlotAllocator slots_ ABSL_GUARDED_BY(mutex_);
  PageTable table_ ABSL_GUARDED_BY(mutex_);
  uint64_t access_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<PageHandle> recency_dirty_ ABSL_GUARDED_BY(mutex_);
  // A copy of the index's records.
  std::map<std::string, std::string> records_ ABSL_GUARDED_BY(mutex_);
  bool putting_ ABSL_GUARDED_BY(mutex_) = false;  // one Put at a time: it is a batch already
  uint64_t puts_ended_ ABSL_GUARDED_BY(mutex_) = 0;
  bool index_busy_ ABSL_GUARDED_BY(mutex_) = false;  // one index write at a time, in order
  Leaving leaving_ ABSL_GUARDED_BY(mutex_);
  bool growing_ ABSL_GUARDED_BY(mutex_) = false;
  TimePoint grow_again_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
