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
#include "storage/device_tier.h"
#include "storage/host_tier.h"
#include "storage/open_tiered_store.h"
#include "storage/pending_hints.h"
#include "storage/promoter.h"
#include "storage/tiered_store.h"
#include "storage/write_through.h"

namespace crumb::storage {

// The store over devices, host memory and a tier below: see TieredStore for the contract. Reading
// is in three_tier_reads.cc, the rest in three_tier_store.cc.
class ThreeTierStore final : public TieredStore {
 public:
  ThreeTierStore(const StoreOptions& options, const Clock& clock, StoreEvents events,
                 DeletionEpochs epochs);
  ~ThreeTierStore() override { Stop(Duration::zero()).IgnoreError(); }

  // Once, before all else. Errors as TieredStore::Open's.
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
  std::optional<LeasedPages> ReadLease(LeaseId lease, const TileRange& range) const override;
  bool Release(LeaseId lease) override;
  std::span<const std::byte> Bytes(const FragmentRef& fragment) const override {
    return host_->Bytes(fragment);
  }
  void Flush(const FlushScope& scope, std::optional<uint64_t> since,
             std::function<void(const FlushReport&)> done) override;
  uint64_t FlushMark(const FlushScope& scope) const override { return host_->LossMark(scope); }
  Durability DurabilityOf(const KeyspaceId& keyspace, const PageKey& key, uint64_t generation,
                          const TileRange& range) const override;
  void SetPending(const KeyspaceId& keyspace, std::span<const PageKey> keys) override {
    pending_.Set(keyspace, keys);
  }
  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until) override;
  uint32_t Unpin(const KeyspaceId& keyspace, std::span<const PageKey> keys) override {
    return Pin(keyspace, keys, TimePoint::min());
  }
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
  std::vector<Slab> slabs() const override { return host_->slabs(); }
  void SetOwner(const KeyspaceId& keyspace, const std::string& tenant) override {
    host_->SetOwner(keyspace, tenant);
  }
  void ForgetOwner(const KeyspaceId& keyspace) override { host_->ForgetOwner(keyspace); }
  absl::Status SetTenant(const KeyspaceId& keyspace, const std::string& tenant) override {
    return host_->SetTenant(keyspace, tenant);
  }
  absl::StatusOr<UniqueFd> OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const override {
    return host_->OpenSlab(slab, keyspace);
  }
  absl::StatusOr<uint64_t> GrowHost(uint64_t bytes) override { return host_->Grow(bytes); }
  DeviceTier* devices() override { return &devices_; }
  StoreStats Stats() const override;
  void EndWaits() override { timer_.ExpireAll(); }
  absl::Status Stop(Duration grace) override;
  absl::StatusOr<HandedOverMemory> HandOver() override;

 private:
  static absl::Status Stopped() { return absl::UnavailableError("the store is stopping"); }
  absl::Status OpenHost(StoreStart start);
  // Pages that the tier below has of the scope's keyspaces.
  uint64_t PagesBelow(const FlushScope& scope) const;
  // How a fragment that is handed over stands with the tier below; none: it was dropped.
  std::optional<Below> BelowOf(const FragmentMeta& meta) const;
  bool has_below() const { return !options_.ssd.path.empty(); }
  bool only_hit() const { return options_.ssd.admission == "second_hit"; }
  void Announce(const KeyspaceId& keyspace, const PageKey& key, Tier tier,
                PageEvent::Kind kind) const;
  FragmentTierEvents EventsOf(Tier tier) const;
  DeviceTier::Options DeviceTierOptions(DeletionEpochs epochs) const;
  FragmentTierEvents DeviceEvents() const { return EventsOf(Tier::kDevice); }
  FragmentTierEvents BelowEvents();
  std::vector<TileRange> Present(const FragmentHeader& header) const;
  struct CommittedPieces {
    int stored_tiles = 0;
    bool overtaken = false;  // others brought some of the tiles that were missing: look again
  };
  // Stores the tiles of the fragment that no tier has.
  absl::StatusOr<CommittedPieces> CommitMissing(const CommitRequest& request);
  absl::Status CommitPiece(const CommitRequest& request, const TileRange& piece);
  absl::StatusOr<Slot> ReserveSlot(const KeyspaceId& keyspace, uint64_t bytes);
  absl::Status Publish(const FragmentMeta& meta, const Slot& slot, Below below);
  void AcquireBelow(AcquireRequest request,
                    std::function<void(absl::StatusOr<AcquireResult>)> done);
  // Answers what is on devices, `pages`, together with what the tiers below answer for the rest.
  void AcquireBeside(AcquireRequest request, std::vector<DeviceTier::PlacesOf> pages,
                     std::function<void(absl::StatusOr<AcquireResult>)> done);
  AcquireResult JoinLeases(const AcquireRequest& request, std::vector<DeviceTier::PlacesOf> pages,
                           std::vector<uint32_t> below_pages, AcquireResult below);
  void NoteUse(const KeyspaceId& keyspace, std::vector<PageKey> keys);
  void TouchBelow(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  const StoreOptions options_;
  const Clock& clock_;
  const StoreEvents events_;
  std::unique_ptr<FragmentTier> below_;
  std::unique_ptr<HostTier> host_;
  PendingHints pending_;
  DeadlineTimer timer_;
  DeviceTier devices_;
  std::unique_ptr<Executor> readers_;
  std::unique_ptr<WriteThrough> writer_;
  std::unique_ptr<Promoter> promoter_;
  Executor recency_;
  std::atomic<bool> stopped_ = false;
  std::atomic<bool> host_ready_ = false;
  TimePoint recency_synced_;  // recency_'s thread only
  Counter dedup_bytes_;
  Counter admission_rejected_;
  Counter verify_failures_;
  Counter demoted_;
};

}  // namespace crumb::storage
