// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host/host_state.h"

#include <bit>
#include <utility>

#include "common/status_macros.h"
#include "storage/bounds.h"

namespace crumb::storage {
namespace {

// Slots begin on the granule, so that they can be written to disk without a copy, and on pages
// where that costs little: disks fill memory faster that is not cut across its pages.
constexpr SlotAllocator::Rounding kRounding = {.granule_bytes = 512, .page_bytes = 4096};

}  // namespace

absl::StatusOr<std::unique_ptr<HostState>> HostState::Open(const Options& options,
                                                           const Clock& clock,
                                                           FragmentTierEvents events) {
  const uint64_t pages = options.host.bytes_max.value / kTypicalPageBytes + 1;
  CRUMB_ASSIGN_OR_RETURN(auto policy, MakePolicy(options.host.policy, pages));
  CRUMB_ASSIGN_OR_RETURN(auto memory,
                         SlabMemory::Open(options.host, options.first_bytes, options.sharing));
  return std::unique_ptr<HostState>(
      new HostState(options, std::move(memory), std::move(policy), clock, std::move(events)));
}

HostState::HostState(const Options& host_options, std::unique_ptr<SlabMemory> slab_memory,
                     std::unique_ptr<EvictionPolicy> policy, const Clock& host_clock,
                     FragmentTierEvents tier_events)
    : options(host_options),
      memory(std::move(slab_memory)),
      clock(host_clock),
      events(std::move(tier_events)),
      losses(options.mark_base),
      numbers(std::bit_ceil(static_cast<uint32_t>(memory->size()))),
      slots(kRounding, inherited),
      table(std::move(policy), slots, &losses),
      slabs(*memory, options.host, slots.own(), inherited, clock.Now()) {
  table.SetPageFragmentsMax(options.page_fragments_max);
  if (options.tenant_part_max_percent > 0) {
    table.held().SetBound(options.host.bytes_max.value, options.tenant_part_max_percent);
  }
}

std::vector<Slab> HostState::MappableSlabs() const {
  std::vector<Slab> all = memory->slabs();
  inherited.AppendTo(all);
  return all;
}

absl::StatusOr<std::unique_ptr<EvictionPolicy>> HostState::NewPolicy() const {
  return MakePolicy(options.host.policy, memory->total_bytes() / kTypicalPageBytes + 1);
}

std::string HostState::TenantOf(const KeyspaceId& keyspace) const {
  if (part_max_percent() == 100) return "";
  return losses.OwnerOf(keyspace).value_or("");
}

bool HostState::HasPartition(const std::string& tenant) const {
  MutexLock lock(&mutex);
  return slabs.PartitionOf(tenant).has_value();
}

uint32_t HostState::PartitionOfTenant(const std::string& tenant,
                                      std::unique_ptr<EvictionPolicy> policy) {
  if (const auto known = slabs.PartitionOf(tenant)) return *known;
  table.order().AddPartition(std::move(policy));
  return slabs.AddPartition(tenant, clock.Now());
}

void HostState::Depart(PageHandle handle, std::vector<Departure>* departures) {
  Page& page = table[handle];
  for (Fragment& fragment : page.fragments) {
    if (fragment.below != Below::kAbsent) continue;
    fragment.below = Below::kQueued;
    fragment.owed_again = false;
    table.Ref(handle);
    departures->push_back({handle, page.MetaOf(fragment)});
  }
}

void HostState::Announce(const std::vector<PageTable::Change>& changes) const {
  for (const PageTable::Change& change : changes) {
    (change.added ? events.added : events.removed)(change.keyspace, change.key);
  }
}

}  // namespace crumb::storage
