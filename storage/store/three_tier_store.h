// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/executor.h"
#include "common/metrics.h"
#include "storage/deadline_timer.h"
#include "storage/device/device_tier.h"
#include "storage/host/host_room.h"
#include "storage/host/host_tier.h"
#include "storage/host/slab_growth.h"
#include "storage/store/acquire_operation.h"
#include "storage/store/lease_table.h"
#include "storage/store/open_tiered_store.h"
#include "storage/store/pending_hints.h"
#include "storage/store/promoter.h"
#include "storage/store/write_through.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// The store over devices, host memory and a tier below: see TieredStore for the contract. Reading
// is in three_tier_reads.cc, the rest in three_tier_store.cc.
//
// Life: it is constructed, Start opens the tiers and starts the threads, Stop ends the threads and
// refuses new calls, and HandOver, if there is a successor, returns host memory. A store whose
// Start failed can only be destroyed.
//
// The way of a call: Commit takes room from room_, publishes the page by host_ and queues it by
// writer_. Acquire refers to pages by devices_ and host_; for the others an AcquireOperation waits
// for promoter_, which reads them from below_ on the threads of readers_. The references are those
// of a lease (leases_) then. Uses are reported to below_ by recency_, because that may block, and
// timer_ ends the waits of Acquires.
//
// Each part has a lock of its own. The store has pins_mutex_ alone, which is taken before them.
class ThreeTierStore final : public TieredStore {
 public:
  ThreeTierStore(const StoreOptions& options, const Clock& clock, StoreEvents events,
                 DeletionEpochs epochs);
  ~ThreeTierStore() override { Stop(Duration::zero()).IgnoreError(); }

  // Opens the tiers and starts the threads. REQUIRES: it is the first call, and the only one.
  // Errors are those of TieredStore::Open.
  absl::Status Start(const OpenFragmentTier& open_below, StoreStart start);

  absl::StatusOr<CommitOutcome> Commit(const CommitRequest& request) override;
  absl::StatusOr<std::shared_ptr<IncomingSlot>> ReserveIncoming(const KeyspaceId& keyspace,
                                                                uint64_t bytes) override;
  absl::StatusOr<CommitOutcome> PublishIncoming(const std::shared_ptr<IncomingSlot>& slot,
                                                const FragmentHeader& header,
                                                uint32_t logical_tile_bytes,
                                                Received received) override;
  void Acquire(AcquireRequest request,
               std::function<void(absl::StatusOr<AcquireResult>)> done) override;
  LookupResult Lookup(const AcquireRequest& request) override;
  std::optional<LeasedPages> ReadLease(LeaseId lease, const TileRange& range) const override {
    return leases_->Read(lease, range);
  }
  bool Release(LeaseId lease) override { return leases_->Release(lease); }
  std::span<const std::byte> Bytes(const FragmentRef& fragment) const override {
    return host_->Bytes(fragment);
  }
  void Flush(const FlushScope& scope, std::optional<uint64_t> since,
             std::function<void(const FlushReport&)> done) override;
  uint64_t FlushMark(const FlushScope& scope) const override {
    return host_state_->losses.Mark(scope);
  }
  Durability DurabilityOf(const KeyspaceId& keyspace, const PageKey& key, uint64_t generation,
                          const TileRange& range) const override;
  void SetPending(const KeyspaceId& keyspace, const std::string& tenant,
                  std::span<const PageKey> keys) override {
    pending_.Set(keyspace, tenant, keys);
  }
  absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                               TimePoint until) override;
  uint32_t Unpin(const KeyspaceId& keyspace, std::span<const PageKey> keys) override;
  absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override;
  absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace, uint64_t generation) override;
  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    return below_->PutRecord(name, value);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() override {
    return below_->Records();
  }
  std::optional<PageKey> ParentOf(const KeyspaceId& keyspace, const PageKey& key) const override;
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&, Tier)>& visit) override;
  uint64_t PageBytes(const KeyspaceId& keyspace, const PageKey& key) const override;
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override {
    return host_->KeyspaceBytes(keyspace) + below_->KeyspaceBytes(keyspace);
  }
  std::vector<Slab> slabs() const override { return host_state_->MappableSlabs(); }
  void SetOwner(const KeyspaceId& keyspace, const std::string& tenant) override {
    host_state_->losses.SetOwner(keyspace, tenant);
    MutexLock lock(&host_state_->mutex);
    host_state_->table.held().SetTenant(keyspace, tenant);
  }
  void ForgetOwner(const KeyspaceId& keyspace) override {
    host_state_->losses.ForgetOwner(keyspace);
    MutexLock lock(&host_state_->mutex);
    host_state_->table.held().ForgetTenant(keyspace);
  }
  absl::Status SetTenant(const KeyspaceId& keyspace, const std::string& tenant) override {
    return room_->SetTenant(keyspace, tenant);
  }
  absl::StatusOr<UniqueFd> OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const override {
    return room_->OpenSlab(slab, keyspace);
  }
  absl::StatusOr<uint64_t> GrowHost(uint64_t bytes) override { return growth_->Grow(bytes); }
  DeviceTier* devices() override { return &devices_; }
  StoreStats Stats() const override;
  void EndWaits() override { timer_.ExpireAll(); }
  absl::Status Stop(Duration grace) override;
  absl::StatusOr<HandedOverMemory> HandOver() override;

 private:
  static absl::Status Stopped() { return absl::UnavailableError("the store is stopping"); }
  absl::Status OpenHost(StoreStart start);
  // Returns how many pages of the scope's keyspaces the tier below has.
  uint64_t PagesBelow(const FlushScope& scope) const;
  // Returns the state in the tier below of a fragment that a predecessor handed over; none if the
  // fragment was dropped.
  std::optional<Below> BelowOf(const FragmentMeta& meta) const;
  bool has_below() const { return !options_.ssd.path.empty(); }
  bool only_hit() const { return options_.ssd.admission == "second_hit"; }
  void Announce(const KeyspaceId& keyspace, const PageKey& key, Tier tier,
                PageEvent::Kind kind) const;
  FragmentTierEvents EventsOf(Tier tier) const;
  DeviceTier::Options DeviceTierOptions(DeletionEpochs epochs) const;
  FragmentTierEvents DeviceEvents() const { return EventsOf(Tier::kDevice); }
  FragmentTierEvents BelowEvents();
  // The state in the tier below of a fragment that is new to this node.
  struct Standing {
    Below below;
    bool owed;
  };
  Standing StandingOf(Received received) const;
  // Returns the tiles of the page that host memory or the tier below has. They are owed to the
  // writer of a commit as if the commit had brought them.
  std::vector<TileRange> Present(const FragmentHeader& header, Received received);
  struct CommittedPieces {
    int stored_tiles = 0;
    bool overtaken = false;  // another commit brought some of the missing tiles: search again
  };
  // Stores the tiles of the fragment that no tier has.
  absl::StatusOr<CommittedPieces> CommitMissing(const CommitRequest& request);
  absl::Status CommitPiece(const CommitRequest& request, const TileRange& piece);
  absl::Status Publish(const FragmentMeta& meta, const Slot& slot, Received received);
  // An Acquire in progress. It refers to pages on devices, and searches the keys at `below_index`
  // in host memory and below. If no page is on a device, both vectors are empty, and it searches
  // all keys there.
  struct Search {
    AcquireRequest request;
    std::vector<DeviceTier::PlacesOf> on_device;
    std::vector<uint32_t> below_index;
    std::function<void(absl::StatusOr<AcquireResult>)> done;
  };
  // Refers to the pages on devices that the search may use. Returns the request for the other
  // pages; none if no page is on a device.
  std::optional<AcquireRequest> RefOnDevices(Search* search);
  // Leases the pages found and calls search.done.
  void Grant(Search&& search, FoundPages&& found);
  // Joins the pages on devices with those that were found below to one prefix, which ends at the
  // first page that is in neither, or that has too many fragments.
  void JoinDevices(Search& search, FoundPages& found, AcquireResult* result);
  // Queues fragments that the tier below lacks, of pages that a read admitted to it.
  void QueueAdmitted(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  void NoteUse(const KeyspaceId& keyspace, std::vector<PageKey> keys);
  void TouchBelow(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  const StoreOptions options_;
  const Clock& clock_;
  const StoreEvents events_;
  // Held while one page is pinned or unpinned in all tiers, so that the tiers agree. Taken before
  // their locks.
  Mutex pins_mutex_;
  std::unique_ptr<FragmentTier> below_;
  std::unique_ptr<HostState> host_state_;
  std::optional<HostTier> host_;
  std::optional<HostRoom> room_;
  std::optional<SlabGrowth> growth_;
  PendingHints pending_;
  DeadlineTimer timer_;
  DeviceTier devices_;
  std::optional<LeaseTable> leases_;
  std::unique_ptr<Executor> readers_;
  std::unique_ptr<WriteThrough> writer_;
  std::unique_ptr<Promoter> promoter_;
  std::unique_ptr<Executor> recency_;
  std::atomic<bool> stopped_ = false;
  std::atomic<bool> host_ready_ = false;
  TimePoint recency_synced_;  // recency_'s thread only
  Counter dedup_bytes_;
  Counter admission_rejected_;
  Counter verify_failures_;
};

}  // namespace crumb::storage
