// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "storage/host/inherited_slabs.h"
#include "storage/host/slab_memory.h"
#include "storage/host/slab_owners.h"
#include "storage/index/page_table.h"
#include "storage/loss_ledger.h"
#include "storage/slot_allocator.h"
#include "storage/store_options.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// A reference to one fragment of a host page that is on its way to the tier below.
struct Departure {
  PageHandle page = kNoPage;  // referred to
  FragmentMeta meta;
};

// The slots of host memory: those of the process's own slabs, which own() allocates, and those of
// inherited slabs, which are claimed by InheritedSlabs and only freed here. Not thread-safe:
// HostState::mutex covers it.
class HostSlots final : public SlotSpace {
 public:
  // `inherited` must outlive this.
  HostSlots(const SlotAllocator::Rounding& rounding, InheritedSlabs& inherited)
      : own_(rounding), inherited_(inherited) {}

  SlotAllocator& own() { return own_; }

  void SetOwner(const Slot& slot, uint32_t owner) override {
    inherited_.Holds(slot.region) ? inherited_.SetOwner(slot, owner) : own_.SetOwner(slot, owner);
  }
  void Free(const Slot& slot) override {
    inherited_.Holds(slot.region) ? inherited_.Free(slot) : own_.Free(slot);
  }
  uint64_t capacity_bytes() const override {
    return own_.capacity_bytes() + inherited_.held_bytes();
  }
  uint64_t used_bytes() const override { return own_.used_bytes() + inherited_.used_bytes(); }
  uint64_t waste_bytes() const override { return own_.waste_bytes(); }

 private:
  SlotAllocator own_;
  InheritedSlabs& inherited_;
};

// Host memory: its slabs and the index of the pages in them, with the lock that covers both.
// HostTier serves the pages, HostRoom makes room for more of them, SlabGrowth takes and gives back
// memory, and host_succession.h hands all of it to another process. The lock is held for
// bookkeeping only and released between pieces of a long call, so other callers may see a part of
// such a call.
struct HostState {
  struct Options {
    HostOptions host;
    // StoreStart::tenant_part_max_percent.
    int64_t tenant_part_max_percent = 0;
    // True: pages that were never read are evicted without being queued for the tier below.
    bool demote_only_hit = false;
    // The part of host.bytes_max that Open takes; SlabGrowth takes the rest.
    uint64_t first_bytes = UINT64_MAX;
    SlabMemory::Sharing sharing = SlabMemory::Sharing::kFixed;
    // StoreStart::free_memory.
    std::function<uint64_t()> free_memory = {};
    // Fragments that one page may have.
    size_t page_fragments_max = SIZE_MAX;
    // Called, without the lock, when nothing will be read in a slab any more.
    std::function<void(uint32_t slab)> slab_gone = {};
    // The base of the marks for Flush (LossLedger), unless adopted memory brings its own.
    uint64_t mark_base = 0;
  };

  // `events` are called without the lock.
  static absl::StatusOr<std::unique_ptr<HostState>> Open(const Options& options, const Clock& clock,
                                                         FragmentTierEvents events);

  std::byte* Data(uint32_t region) const {
    return inherited.Holds(region) ? inherited.data(region) : memory->data(region);
  }
  std::span<std::byte> Memory(const Slot& slot) const {
    return {Data(slot.region) + slot.offset, slot.bytes};
  }
  // All slabs, for processes to map.
  std::vector<Slab> MappableSlabs() const;

  // Returns the number by which readers identify a slab. It changes whenever the slab is given to a
  // partition, also one that keeps its file because it was never written to: a notice that the slab
  // is gone may arrive after the slab was given, and must not name a slab that has pages.
  uint32_t NumberOf(uint32_t region) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return region < slabs.size() ? region + slabs[region].given * numbers : region;
  }
  uint32_t RegionOf(uint32_t number) const { return number & (numbers - 1); }

  absl::StatusOr<std::unique_ptr<EvictionPolicy>> NewPolicy() const;
  bool HasPartition(const std::string& tenant) const;
  // Returns the percentage of a budget that one tenant may have (TenantBudget); 100 if the server
  // does not distinguish tenants.
  int64_t part_max_percent() const {
    return options.tenant_part_max_percent > 0 ? options.tenant_part_max_percent : 100;
  }
  // Returns the tenant in whose budgets the keyspace counts; "" if it has none, if it is not known
  // yet, or if the server does not distinguish tenants.
  std::string TenantOf(const KeyspaceId& keyspace) const;
  // Returns the tenant's partition; 0 for no tenant. Adds it if the tenant has none: then `policy`
  // orders its pages. REQUIRES: HasPartition(tenant), or `policy` is not null.
  uint32_t PartitionOfTenant(const std::string& tenant, std::unique_ptr<EvictionPolicy> policy)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Marks the page's fragments that the tier below lacks as queued, refers to the page once for
  // each, and adds them to `departures`.
  void Depart(PageHandle page, std::vector<Departure>* departures)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Calls the events. Without the lock.
  void Announce(const std::vector<PageTable::Change>& changes) const;

  const Options options;
  const std::unique_ptr<SlabMemory> memory;
  const Clock& clock;
  const FragmentTierEvents events;
  LossLedger losses;
  uint32_t numbers = 1;      // power of two above all regions; fixed once other threads see it
  InheritedSlabs inherited;  // changed with `mutex` held

  mutable Mutex mutex;
  HostSlots slots ABSL_GUARDED_BY(mutex);
  PageTable table ABSL_GUARDED_BY(mutex);
  SlabOwners slabs ABSL_GUARDED_BY(mutex);

 private:
  HostState(const Options& options, std::unique_ptr<SlabMemory> memory,
            std::unique_ptr<EvictionPolicy> policy, const Clock& clock, FragmentTierEvents events);
};

}  // namespace crumb::storage
