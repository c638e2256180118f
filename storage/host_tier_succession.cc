// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The part of a host tier that outlives its process: what is handed over, and what is adopted.
#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "common/errno_status.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/host_tier.h"

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
      known[at] = true;  // with depth 0 until the chain is walked back
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

}  // namespace

void LimitToHandedOver(const HandedOverMemory& memory, HostTier::Options* options) {
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

HostTier::Adopted HostTier::Adopt(
    HandedOverMemory memory,
    const std::function<std::optional<Below>(const FragmentMeta&)>& below) {
  {
    MutexLock lock(&mutex_);
    if (memory.image.losses.has_value()) losses_.Restore(*memory.image.losses);
    revoked_of_ = memory.image.revoked;
    revoked_ = SumOf(revoked_of_);
  }
  const auto leave_all_out = [&] {
    MutexLock lock(&mutex_);
    for (const HostImage::Page& page : memory.image.pages) CountLeftOut(page, below);
    return Adopted{.pages = 0, .left_out = memory.image.pages.size()};
  };
  const uint64_t fit = SlabsThatFit(memory.image, memory_->total_bytes());
  if (fit == 0 || memory.slabs.size() != memory.image.slabs) return leave_all_out();
  const auto [regions, held] =
      RegionsFor(memory.image, fit, static_cast<uint32_t>(memory_->size()));
  std::vector<UniqueFd> slabs(held);
  for (uint32_t i = 0; i < regions.size(); ++i) {
    if (regions[i] != kNoRegion) slabs[regions[i] - memory_->size()] = std::move(memory.slabs[i]);
  }
  MutexLock growing(&growing_);
  progress_ = clock_.Now();
  Adopted adopted;
  absl::Status mapped;
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    const auto shares = SharesOf(memory.image);
    mapped = shares.status();
    if (mapped.ok()) {
      std::vector<uint32_t> held_shares(held, InheritedSlabs::kMixed);
      for (uint32_t i = 0; i < regions.size(); ++i) {
        if (regions[i] != kNoRegion) held_shares[regions[i] - memory_->size()] = (*shares)[i];
      }
      mapped = inherited_.Adopt(std::move(slabs), memory.image.slab_bytes,
                                static_cast<uint32_t>(memory_->size()), held_shares);
    }
    if (mapped.ok()) {
      for (uint32_t i = 0; i < regions.size(); ++i) {
        if (regions[i] != kNoRegion) continue;
        inherited_.AddLeaving(std::move(memory.slabs[i]), memory.image.slab_bytes, (*shares)[i]);
      }
      numbers_ = std::bit_ceil(static_cast<uint32_t>(memory_->size() + held));
      adopted = AdoptPages(memory.image, regions, below);
      changes = table_.TakeChanges();
    }
  }
  if (!mapped.ok()) {
    LogWarning("host tier: memory of the process before is left out: {}", mapped.ToString());
    return leave_all_out();
  }
  Announce(changes);
  return adopted;
}

HostTier::Adopted HostTier::AdoptPages(
    const HostImage& image, std::span<const uint32_t> regions,
    const std::function<std::optional<Below>(const FragmentMeta&)>& below) {
  for (const auto& [keyspace, generation] : image.generations) {
    table_.RaiseGeneration(keyspace, generation);
  }
  Adopted adopted;
  TimePoint access = TimePoint::min();
  for (const HostImage::Page& page : image.pages) {
    if (page.used != access) {
      for (uint32_t share = 0; share < table_.shares(); ++share) table_.BeginAccess(share);
    }
    access = page.used;
    if (AdoptTenant(page, regions) && AdoptPage(page, regions, below)) {
      ++adopted.pages;
    } else {
      ++adopted.left_out;
      CountLeftOut(page, below);
    }
  }
  return adopted;
}

void HostTier::CountLeftOut(const HostImage::Page& page,
                            const std::function<std::optional<Below>(const FragmentMeta&)>& below) {
  const bool owed = std::any_of(page.fragments.begin(), page.fragments.end(),
                                [&](const HostImage::Fragment& fragment) {
                                  const std::optional<Below> stands = below(MetaOf(page, fragment));
                                  // A page that reading admits is owed from its first read on.
                                  return stands == Below::kAbsent || stands == Below::kRefused ||
                                         (stands == Below::kUnowed && page.was_hit);
                                });
  if (owed) losses_.Add(page.keyspace);
}

absl::StatusOr<std::vector<uint32_t>> HostTier::SharesOf(const HostImage& image) {
  std::vector<uint32_t> shares(image.slabs, InheritedSlabs::kMixed);
  for (size_t slab = 0; slab < image.tenants.size(); ++slab) {
    CRUMB_ASSIGN_OR_RETURN(
        auto policy, MakePolicy(options_.host.policy, capacity_bytes() / kTypicalPageBytes + 1));
    shares[slab] = ShareOfTenant(image.tenants[slab], std::move(policy));
  }
  return shares;
}

bool HostTier::AdoptTenant(const HostImage::Page& page, std::span<const uint32_t> regions) {
  uint32_t share = InheritedSlabs::kMixed;
  for (const HostImage::Fragment& fragment : page.fragments) {
    const uint32_t region = regions[fragment.slot.region];
    if (region == kNoRegion) return false;
    const uint32_t here = inherited_.share(region);
    if (share != InheritedSlabs::kMixed && here != share) return false;
    share = here;
  }
  if (share == InheritedSlabs::kMixed || share == table_.ShareOf(page.keyspace)) return true;
  if (!table_.PagesBelow(page.keyspace, UINT64_MAX, /*limit=*/1).empty()) return false;
  table_.SetShare(page.keyspace, share);
  return true;
}

bool HostTier::AdoptPage(const HostImage::Page& page, std::span<const uint32_t> regions,
                         const std::function<std::optional<Below>(const FragmentMeta&)>& below) {
  // Whatever the image says, a page came and was used between the clock's beginning and now.
  const TimePoint now = clock_.Now();
  const TimePoint used = std::clamp(page.used, TimePoint(), now);
  PageHandle handle = kNoPage;
  for (const HostImage::Fragment& fragment : page.fragments) {
    const FragmentMeta meta = MetaOf(page, fragment);
    Slot slot = fragment.slot;
    slot.region = regions[slot.region];
    absl::StatusOr<PageHandle> inserted = absl::DataLossError("");
    if (slot.region != kNoRegion && inherited_.Claim(slot, SlotAllocator::kNoOwner)) {
      const std::optional<Below> stands = below(meta);
      if (stands.has_value() && CheckFragmentHeader(meta, Memory(slot)).ok()) {
        inserted = table_.Insert(meta, slot, *stands, used);
      }
      if (!inserted.ok()) inherited_.Free(slot);
    }
    if (inserted.ok()) {
      handle = *inserted;
    } else {
      if (handle != kNoPage) table_.Remove(handle, RemovalReason::kCorrupt, now);
      return false;
    }
  }
  Page& adopted = table_[handle];
  table_[handle].was_hit = page.was_hit;
  adopted.added = std::clamp(page.added, TimePoint(), used);
  adopted.used = used;  // and not pinned: no budget of this process counts the pins of another one
  return true;
}

bool HostTier::MayBeKept(uint32_t region) const {
  if (inherited_.Holds(region)) return inherited_.Shrinks(region);
  const SlabState& slab = slabs_[region];
  return memory_->sharing() == SlabMemory::Sharing::kByTenant && slab.written && !slab.dropped;
}

absl::StatusOr<HandedOverMemory> HostTier::HandOver() {
  HandedOverMemory memory;
  memory.image.slab_bytes = memory_->slab_bytes();
  std::vector<uint32_t> places(slabs().size(), kNoRegion);
  const auto add = [&](int file, const std::string& tenant) -> absl::Status {
    CRUMB_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(file));
    memory.slabs.push_back(std::move(copy));
    memory.image.tenants.push_back(tenant);
    ++memory.image.slabs;
    return absl::OkStatus();
  };
  MutexLock lock(&mutex_);
  table_.ForEachPage([&](PageHandle, const Page& page) {
    for (const Fragment& fragment : page.fragments) places[fragment.slot.region] = 0;
  });
  std::vector<std::string> names(table_.shares());
  for (const auto& [tenant, share] : share_of_tenant_) names[share] = tenant;
  bool mixed = table_.shares() == 1;
  names.emplace_back();  // of slabs that are mixed
  const auto name_of = [&](uint32_t share) { return names[std::min(share, table_.shares())]; };
  for (uint32_t i = 0; i < places.size(); ++i) {
    const bool has_pages = places[i] != kNoRegion;
    if (!has_pages && !MayBeKept(i)) continue;
    if (has_pages) places[i] = memory.image.slabs;
    const uint32_t share = inherited_.Holds(i) ? inherited_.share(i) : slabs_[i].share;
    mixed |= has_pages && share == InheritedSlabs::kMixed;
    const int file = inherited_.Holds(i) ? inherited_.file(i) : memory_->file(i);
    CRUMB_RETURN_IF_ERROR(add(file, name_of(share)));
  }
  for (const InheritedSlabs::Leaving& slab : inherited_.leaving()) {
    CRUMB_RETURN_IF_ERROR(add(slab.file.get(), name_of(slab.share)));
  }
  if (mixed) memory.image.tenants.clear();
  table_.ForEachPage(
      [&](PageHandle, const Page& page) { memory.image.pages.push_back(ImageOf(page, places)); });
  memory.image.generations = table_.Generations();
  memory.image.losses = losses_.state();
  memory.image.revoked = revoked_of_;
  SortForSuccessor(&memory.image.pages);
  return memory;
}

std::vector<Slab> HostTier::slabs() const {
  std::vector<Slab> slabs = memory_->slabs();
  inherited_.AppendTo(slabs);
  return slabs;
}

}  // namespace crumb::storage
