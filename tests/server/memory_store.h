// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/mapping.h"
#include "common/mutex.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// A TieredStore of one slab without eviction or SSD. Every page is one fragment, and slots are not
// used again. Pages become durable when Flush is called. store_contract_test.cc runs the real
// store's contract tests on it. Thread-safe.
class MemoryStore : public storage::TieredStore {
 public:
  // Fragments of at most `slot_bytes` each. `records` lives on when the store goes, like a disk.
  using RecordMap = std::map<std::string, std::string>;
  MemoryStore(size_t slots, size_t slot_bytes, storage::StoreEvents events,
              std::shared_ptr<RecordMap> records = std::make_shared<RecordMap>());

  absl::StatusOr<CommitOutcome> Commit(const storage::CommitRequest& request) override;
  absl::StatusOr<std::shared_ptr<storage::IncomingSlot>> ReserveIncoming(const KeyspaceId& keyspace,
                                                                         uint64_t bytes) override;
  void SetOwner(const KeyspaceId&, const std::string&) override {}
  void ForgetOwner(const KeyspaceId&) override {}
  absl::Status SetTenant(const KeyspaceId&, const std::string&) override {
    return absl::UnimplementedError("one slab for all");
  }
  absl::StatusOr<UniqueFd> OpenSlab(uint32_t, const KeyspaceId&) const override {
    return absl::UnimplementedError("one slab for all");
  }
  absl::StatusOr<CommitOutcome> PublishIncoming(const std::shared_ptr<storage::IncomingSlot>& slot,
                                                const FragmentHeader& header,
                                                uint32_t logical_tile_bytes,
                                                storage::Received received) override;
  void Acquire(storage::AcquireRequest request,
               std::function<void(absl::StatusOr<storage::AcquireResult>)> done) override;
  storage::LookupResult Lookup(const storage::AcquireRequest& request) override;
  std::optional<storage::LeasedPages> ReadLease(storage::LeaseId lease,
                                                const TileRange& range) const override;
  bool Release(storage::LeaseId lease) override;
  std::span<const std::byte> Bytes(const storage::FragmentRef& fragment) const override;
  void Flush(const storage::FlushScope& scope, std::optional<uint64_t> since,
             std::function<void(const FlushReport&)> done) override;
  uint64_t FlushMark(const storage::FlushScope&) const override { return 1; }
  storage::Durability DurabilityOf(const KeyspaceId& keyspace, const PageKey& key,
                                   uint64_t generation, const TileRange& range) const override;
  void SetPending(const KeyspaceId&, const std::string&, std::span<const PageKey> keys) override {
    pending_.assign(keys.begin(), keys.end());
  }
  absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                               TimePoint) override;
  uint32_t Unpin(const KeyspaceId& keyspace, std::span<const PageKey> keys) override;
  absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override;
  absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace, uint64_t generation) override;
  absl::Status PutRecord(const std::string& name, const std::string& value) override;
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() override;
  std::optional<PageKey> ParentOf(const KeyspaceId& keyspace, const PageKey& key) const override;
  uint64_t PageBytes(const KeyspaceId& keyspace, const PageKey& key) const override;
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override;
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&, Tier)>& visit) override;
  std::vector<storage::Slab> slabs() const override;
  absl::StatusOr<uint64_t> GrowHost(uint64_t) override { return uint64_t{0}; }
  storage::StoreStats Stats() const override;
  absl::Status Stop(Duration) override { return absl::OkStatus(); }
  absl::StatusOr<storage::HandedOverMemory> HandOver() override {
    return absl::UnimplementedError("a fake has no successor");
  }

  // The keys of the last SetPending.
  const std::vector<PageKey>& pending() const { return pending_; }

  // The scope of the last Flush.
  const storage::FlushScope& flush_scope() const { return flush_scope_; }

  // Pages are found in this tier from now on.
  void ReportTier(Tier tier);

  // Acquires from now on call back only in RespondHeld.
  void HoldAcquires();
  void RespondHeld();

 private:
  using Name = std::pair<KeyspaceId, PageKey>;
  struct Page {
    uint64_t generation = 0;
    size_t slot = 0;
    uint32_t tiles_bytes = 0;
    size_t bytes = 0;
    PageKey parent;
  };
  using Held = std::pair<storage::AcquireRequest,
                         std::function<void(absl::StatusOr<storage::AcquireResult>)>>;

  storage::AcquireResult AcquireLocked(const storage::AcquireRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Page* FindLocked(const KeyspaceId& keyspace, const PageKey& key) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t slots_;
  const size_t slot_bytes_;
  const storage::StoreEvents events_;
  const std::shared_ptr<RecordMap> records_;
  UniqueFd fd_;
  Mapping mapping_;
  mutable Mutex mutex_;
  // Bytes in each used slot, which leases may read after the page is deleted.
  std::vector<size_t> slot_sizes_ ABSL_GUARDED_BY(mutex_);
  std::map<KeyspaceId, uint64_t> generations_ ABSL_GUARDED_BY(mutex_);  // least one, once dropped
  storage::LeaseId last_lease_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<Name, Page> pages_ ABSL_GUARDED_BY(mutex_);
  std::map<storage::LeaseId, storage::AcquireResult> leases_ ABSL_GUARDED_BY(mutex_);
  std::vector<Name> not_durable_ ABSL_GUARDED_BY(mutex_);
  bool hold_ ABSL_GUARDED_BY(mutex_) = false;
  Tier tier_ ABSL_GUARDED_BY(mutex_) = Tier::kHost;
  std::vector<Held> held_ ABSL_GUARDED_BY(mutex_);
  std::vector<PageKey> pending_;  // set by the thread that reads it
  storage::FlushScope flush_scope_;
};

}  // namespace crumb::server
