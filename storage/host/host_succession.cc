// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host/host_succession.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <memory>
#include <utility>

#include "common/errno_status.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/host/slab_growth.h"

namespace crumb::storage {
namespace {

// Slabs of `memory` that a tier of `bytes_max` has room for.
uint64_t SlabsThatFit(const HostImage& image, uint64_t bytes_max) {
  if (image.slab_bytes == 0 || image.slab_bytes % SlotAllocator::kChunkBytesMin != 0) return 0;
  return std::min<uint64_t>(image.slabs, bytes_max / image.slab_bytes);
}

// Stands for a slab of the image that becomes no region: one without pages, or one there is no room
// for. The fullest ones stay.
constexpr uint32_t kNoRegion = UINT32_MAX;
struct Placement {
  std::vector<uint32_t> regions;  // [image.slabs]
  uint64_t held = 0;              // slabs that become regions
};
Placement RegionsFor(const HostImage& image, uint64_t fit, uint32_t first_region) {
  std::vector<uint64_t> used(image.slabs, 0);
  for (const HostImage::Page& page : image.pages) {
    for (const HostImage::Fragment& fragment : page.fragments) {
      used[fragment.slot.region] += fragment.slot.bytes;
    }
  }
  std::vector<uint32_t> order(image.slabs);
  for (uint32_t i = 0; i < image.slabs; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return used[a] > used[b]; });
  Placement placement = {std::vector<uint32_t>(image.slabs, kNoRegion)};
  for (const uint32_t slab : order) {
    if (placement.held == fit || used[slab] == 0) break;
    placement.regions[slab] = first_region + static_cast<uint32_t>(placement.held++);
  }
  return placement;
}

uint64_t SumOf(const std::map<std::string, uint64_t>& slabs_of) {
  uint64_t sum = 0;
  for (const auto& [tenant, slabs] : slabs_of) sum += slabs;
  return sum;
}

absl::StatusOr<UniqueFd> Duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return ErrnoStatus(errno, "duplicating a slab's descriptor");
  return copy;
}

// How many ancestors of each page are among `pages`; those in a ring count as having none.
std::vector<uint32_t> Depths(const std::vector<HostImage::Page>& pages) {
  absl::flat_hash_map<std::pair<KeyspaceId, PageKey>, size_t> places;
  for (size_t i = 0; i < pages.size(); ++i) places[{pages[i].keyspace, pages[i].key}] = i;
  std::vector<uint32_t> depths(pages.size(), 0);
  std::vector<bool> known(pages.size(), false);
  std::vector<size_t> chain;
  for (size_t i = 0; i < pages.size(); ++i) {
    chain.clear();
    for (size_t at = i; !known[at];) {
      known[at] = true;  // its depth stays 0 until the chain is walked back
      chain.push_back(at);
      const auto parent = places.find({pages[at].keyspace, pages[at].parent});
      if (parent == places.end()) break;
      at = parent->second;
    }
    for (auto at = chain.rbegin(); at != chain.rend(); ++at) {
      const auto parent = places.find({pages[*at].keyspace, pages[*at].parent});
      if (parent != places.end()) depths[*at] = depths[parent->second] + 1;
    }
  }
  return depths;
}

void SortForSuccessor(std::vector<HostImage::Page>* pages) {
  const std::vector<uint32_t> depths = Depths(*pages);
  std::vector<size_t> order(pages->size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if ((*pages)[a].used != (*pages)[b].used) return (*pages)[a].used < (*pages)[b].used;
    return depths[a] > depths[b];
  });
  std::vector<HostImage::Page> sorted;
  sorted.reserve(pages->size());
  for (const size_t i : order) sorted.push_back(std::move((*pages)[i]));
  *pages = std::move(sorted);
}

FragmentMeta MetaOf(const HostImage::Page& page, const HostImage::Fragment& fragment) {
  return {.keyspace = page.keyspace,
          .key = page.key,
          .parent = page.parent,
          .generation = page.generation,
          .range = fragment.range,
          .tiles_bytes = fragment.tiles_bytes,
          .bytes = fragment.bytes,
          .logical_tile_bytes = fragment.logical_tile_bytes};
}

HostImage::Page ImageOf(const Page& page, std::span<const uint32_t> places) {
  HostImage::Page image = {.keyspace = page.keyspace,
                           .key = page.key,
                           .parent = page.parent,
                           .generation = page.generation,
                           .was_hit = page.was_hit,
                           .added = page.added,
                           .used = page.used,
                           .pinned_until = page.pinned_until,
                           .fragments = {}};
  for (const Fragment& fragment : page.fragments) {
    Slot slot = fragment.slot;
    slot.region = places[slot.region];
    image.fragments.push_back(
        {fragment.range, fragment.tiles_bytes, fragment.bytes, fragment.logical_tile_bytes, slot});
  }
  return image;
}

// Takes the pages of an image into host memory.
class Adoption {
 public:
  Adoption(HostState& state, const HostImage& image, const BelowOfAdopted& below)
      : state_(state), image_(image), below_(below) {}

  Adopted LeaveAllOut() {
    MutexLock lock(&state_.mutex);
    for (const HostImage::Page& page : image_.pages) CountLeftOut(page);
    return {.pages = 0, .left_out = image_.pages.size()};
  }
  // Maps the slabs as regions from `first` on, takes the pages in them, and counts those that it
  // left out. Nothing is taken if there is an error.
  absl::StatusOr<Adopted> Take(std::vector<UniqueFd> files, const Placement& placement,
                               uint32_t first);

 private:
  Adopted TakePages(std::span<const uint32_t> regions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Returns the partition of each slab of the image.
  absl::StatusOr<std::vector<uint32_t>> Partitions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Takes a page in, or nothing of it.
  bool TakePage(const HostImage::Page& page, std::span<const uint32_t> regions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Makes the page's keyspace one of the tenant whose slabs it lies in. False: that cannot be.
  bool TakeTenant(const HostImage::Page& page, std::span<const uint32_t> regions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Whether a fragment that stands so with the tier below is owed to its writer. The image does not
  // say of a page whether it was durable once, so that one is owed again.
  bool IsOwed(const HostImage::Page& page, Below stands) const;
  // Counts a page that was left out as lost, if the tier below was to have it.
  void CountLeftOut(const HostImage::Page& page);

  HostState& state_;
  const HostImage& image_;
  const BelowOfAdopted& below_;
};

absl::StatusOr<Adopted> Adoption::Take(std::vector<UniqueFd> files, const Placement& placement,
                                       uint32_t first) {
  Adopted adopted;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&state_.mutex);
    CRUMB_ASSIGN_OR_RETURN(const std::vector<uint32_t> partitions, Partitions());
    std::vector<UniqueFd> held(placement.held);
    std::vector<uint32_t> held_partitions(placement.held, InheritedSlabs::kMixed);
    for (uint32_t i = 0; i < files.size(); ++i) {
      if (placement.regions[i] == kNoRegion) continue;
      held[placement.regions[i] - first] = std::move(files[i]);
      held_partitions[placement.regions[i] - first] = partitions[i];
    }
    CRUMB_RETURN_IF_ERROR(
        state_.inherited.Adopt(std::move(held), image_.slab_bytes, first, held_partitions));
    for (uint32_t i = 0; i < files.size(); ++i) {
      if (placement.regions[i] != kNoRegion) continue;
      state_.inherited.AddLeaving(std::move(files[i]), image_.slab_bytes, partitions[i]);
    }
    state_.numbers = std::bit_ceil(static_cast<uint32_t>(first + placement.held));
    adopted = TakePages(placement.regions);
    changes = state_.table.TakeChanges();
  }
  state_.Announce(changes);
  return adopted;
}

Adopted Adoption::TakePages(std::span<const uint32_t> regions) {
  for (const auto& [keyspace, generation] : image_.generations) {
    state_.table.RaiseGeneration(keyspace, generation);
  }
  Adopted adopted;
  TimePoint access = TimePoint::min();
  for (const HostImage::Page& page : image_.pages) {
    if (page.used != access) {
      for (uint32_t partition = 0; partition < state_.table.order().partitions(); ++partition) {
        state_.table.order().BeginAccess(partition);
      }
    }
    access = page.used;
    if (TakeTenant(page, regions) && TakePage(page, regions)) {
      ++adopted.pages;
    } else {
      ++adopted.left_out;
      CountLeftOut(page);
    }
  }
  return adopted;
}

bool Adoption::IsOwed(const HostImage::Page& page, Below stands) const {
  if (stands == Below::kStored) return false;
  // A page that reading admits is owed from its first read on.
  return stands == Below::kRefused || !state_.options.demote_only_hit || page.was_hit;
}

void Adoption::CountLeftOut(const HostImage::Page& page) {
  const bool owed = std::any_of(
      page.fragments.begin(), page.fragments.end(), [&](const HostImage::Fragment& fragment) {
        const std::optional<Below> stands = below_(MetaOf(page, fragment));
        return stands.has_value() && IsOwed(page, *stands);
      });
  if (owed) state_.losses.Add(page.keyspace);
}

absl::StatusOr<std::vector<uint32_t>> Adoption::Partitions() {
  std::vector<uint32_t> partitions(image_.slabs, InheritedSlabs::kMixed);
  for (size_t slab = 0; slab < image_.tenants.size(); ++slab) {
    std::unique_ptr<EvictionPolicy> policy;
    if (!state_.slabs.PartitionOf(image_.tenants[slab])) {
      CRUMB_ASSIGN_OR_RETURN(policy, state_.NewPolicy());
    }
    partitions[slab] = state_.PartitionOfTenant(image_.tenants[slab], std::move(policy));
  }
  return partitions;
}

bool Adoption::TakeTenant(const HostImage::Page& page, std::span<const uint32_t> regions) {
  uint32_t partition = InheritedSlabs::kMixed;
  for (const HostImage::Fragment& fragment : page.fragments) {
    const uint32_t region = regions[fragment.slot.region];
    if (region == kNoRegion) return false;
    const uint32_t here = state_.inherited.partition(region);
    if (partition != InheritedSlabs::kMixed && here != partition) return false;
    partition = here;
  }
  if (partition == InheritedSlabs::kMixed ||
      partition == state_.table.pages().PartitionOf(page.keyspace)) {
    return true;
  }
  if (!state_.table.pages().PagesOlderThan(page.keyspace, UINT64_MAX, /*limit=*/1).empty())
    return false;
  state_.table.SetPartition(page.keyspace, partition);
  return true;
}

bool Adoption::TakePage(const HostImage::Page& page, std::span<const uint32_t> regions) {
  // Whatever the image says, a page came and was used between the clock's beginning and now.
  const TimePoint now = state_.clock.Now();
  const TimePoint used = std::clamp(page.used, TimePoint(), now);
  PageHandle handle = kNoPage;
  for (const HostImage::Fragment& fragment : page.fragments) {
    const FragmentMeta meta = MetaOf(page, fragment);
    Slot slot = fragment.slot;
    slot.region = regions[slot.region];
    absl::StatusOr<PageHandle> inserted = absl::DataLossError("");
    if (slot.region != kNoRegion && state_.inherited.Claim(slot, SlotAllocator::kNoOwner)) {
      const std::optional<Below> stands = below_(meta);
      if (stands.has_value() && CheckFragmentHeader(meta, state_.Memory(slot)).ok()) {
        inserted = state_.table.Insert(meta, slot, *stands, IsOwed(page, *stands), used);
      }
      if (!inserted.ok()) state_.inherited.Free(slot);
    }
    if (inserted.ok()) {
      handle = *inserted;
    } else {
      if (handle != kNoPage) state_.table.Remove(handle, RemovalReason::kCorrupt, now);
      return false;
    }
  }
  Page& adopted = state_.table[handle];
  adopted.was_hit = page.was_hit;
  adopted.added = std::clamp(page.added, TimePoint(), used);
  // The page is not pinned: no budget of this process counts the pins of its predecessor.
  adopted.used = used;
  return true;
}

// Whether other processes may have the memory of a slab without pages, so that the next process
// has to know of it.
bool MayBeKept(const HostState& state, uint32_t region) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  if (state.inherited.Holds(region)) return state.inherited.Shrinks(region);
  const SlabOwners::Slab& slab = state.slabs[region];
  return state.memory->sharing() == SlabMemory::Sharing::kByTenant && slab.written && !slab.dropped;
}

}  // namespace

void LimitToHandedOver(const HandedOverMemory& memory, HostState::Options* options) {
  const uint64_t total = options->host.bytes_max.value;
  const uint64_t fit = SlabsThatFit(memory.image, total);
  if (fit == 0) return;
  const uint64_t held = RegionsFor(memory.image, fit, 0).held;
  if (options->host.slab_bytes.value != memory.image.slab_bytes) {
    LogInfo("host tier: slabs have {} bytes, as those that are taken over",
            memory.image.slab_bytes);
    options->host.slab_bytes.value = memory.image.slab_bytes;
  }
  // There is one slab at least, for pages to move to.
  const uint64_t slabs = std::min(
      SlabsBeside(held, memory.image.slabs - held, SumOf(memory.image.revoked), options->host),
      total / memory.image.slab_bytes - 1);
  options->first_bytes = std::min(options->first_bytes, total - slabs * memory.image.slab_bytes);
}

Adopted Adopt(HostState& state, HandedOverMemory memory, const BelowOfAdopted& below) {
  if (memory.image.losses.has_value()) state.losses.Restore(*memory.image.losses);
  {
    MutexLock lock(&state.mutex);
    state.slabs.SetRevoked(memory.image.revoked);
  }
  Adoption adoption(state, memory.image, below);
  const uint64_t fit = SlabsThatFit(memory.image, state.memory->total_bytes());
  if (fit == 0 || memory.slabs.size() != memory.image.slabs) return adoption.LeaveAllOut();
  const auto first = static_cast<uint32_t>(state.memory->size());
  const absl::StatusOr<Adopted> adopted =
      adoption.Take(std::move(memory.slabs), RegionsFor(memory.image, fit, first), first);
  if (adopted.ok()) return *adopted;
  LogWarning("host tier: memory of the process before is left out: {}",
             adopted.status().ToString());
  return adoption.LeaveAllOut();
}

absl::StatusOr<HandedOverMemory> HandOver(const HostState& state) {
  HandedOverMemory memory;
  memory.image.slab_bytes = state.memory->slab_bytes();
  std::vector<uint32_t> places(state.MappableSlabs().size(), kNoRegion);
  const auto add = [&](int file, const std::string& tenant) -> absl::Status {
    CRUMB_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(file));
    memory.slabs.push_back(std::move(copy));
    memory.image.tenants.push_back(tenant);
    ++memory.image.slabs;
    return absl::OkStatus();
  };
  MutexLock lock(&state.mutex);
  state.table.pages().ForEach([&](PageHandle, const Page& page) {
    for (const Fragment& fragment : page.fragments) places[fragment.slot.region] = 0;
  });
  bool mixed = state.table.order().partitions() == 1;
  const auto name_of = [&](uint32_t partition) {
    state.mutex.AssertHeld();
    return partition == InheritedSlabs::kMixed ? "" : state.slabs.TenantOf(partition);
  };
  for (uint32_t i = 0; i < places.size(); ++i) {
    const bool has_pages = places[i] != kNoRegion;
    if (!has_pages && !MayBeKept(state, i)) continue;
    if (has_pages) places[i] = memory.image.slabs;
    const uint32_t partition =
        state.inherited.Holds(i) ? state.inherited.partition(i) : state.slabs[i].partition;
    mixed |= has_pages && partition == InheritedSlabs::kMixed;
    const int file = state.inherited.Holds(i) ? state.inherited.file(i) : state.memory->file(i);
    CRUMB_RETURN_IF_ERROR(add(file, name_of(partition)));
  }
  for (const InheritedSlabs::Leaving& slab : state.inherited.leaving()) {
    CRUMB_RETURN_IF_ERROR(add(slab.file.get(), name_of(slab.partition)));
  }
  if (mixed) memory.image.tenants.clear();
  state.table.pages().ForEach(
      [&](PageHandle, const Page& page) { memory.image.pages.push_back(ImageOf(page, places)); });
  memory.image.generations = state.table.pages().Generations();
  memory.image.losses = state.losses.state();
  memory.image.revoked = state.slabs.revoked();
  SortForSuccessor(&memory.image.pages);
  return memory;
}

}  // namespace crumb::storage
