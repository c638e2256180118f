// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/page_table.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "common/status_macros.h"
#include "storage/bounds.h"
#include "storage/coverage.h"

namespace crumb::storage {
namespace {

// `times` observations of one value.
void Observe(HistogramSnapshot& histogram, double value, uint64_t times) {
  const auto bucket = std::lower_bound(histogram.bounds.begin(), histogram.bounds.end(), value) -
                      histogram.bounds.begin();
  histogram.counts[static_cast<size_t>(bucket)] += times;
  histogram.sum += value * static_cast<double>(times);
}

double Seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

// Whether the tier below lacks the fragment, though a writer was promised that it would be durable.
bool IsLost(const Fragment& fragment) { return fragment.owed && fragment.below != Below::kStored; }

uint64_t FingerprintOf(const PageKey& key) {
  uint64_t fingerprint;
  std::memcpy(&fingerprint, key.bytes.data(), sizeof(fingerprint));
  return fingerprint;
}

}  // namespace

bool Page::Covers(const TileRange& range) const {
  if (fragments.size() == 1) return Contains(fragments[0].range, range);
  int tiles = 0;
  for (const Fragment& fragment : fragments) tiles += Intersect(fragment.range, range).tiles();
  return tiles == range.tiles();
}

HistogramSnapshot SnapshotOf(const Histogram& histogram) {
  HistogramSnapshot snapshot;
  snapshot.bounds.assign(histogram.bounds().begin(), histogram.bounds().end());
  for (size_t i = 0; i <= snapshot.bounds.size(); ++i) {
    snapshot.counts.push_back(histogram.bucket(i));
  }
  snapshot.sum = histogram.sum();
  return snapshot;
}

PageTable::PageTable(std::unique_ptr<EvictionPolicy> policy,
                     const SlotAllocator::Rounding& rounding, InheritedSlabs* inherited,
                     LossLedger* losses)
    : allocator_(std::make_unique<SlotAllocator>(rounding)),
      slots_(*allocator_),
      inherited_(inherited),
      losses_(losses),
      lifetime_seconds_(LifetimeBounds()),
      reuse_seconds_(SnapshotOf(lifetime_seconds_)) {
  AddPartition(std::move(policy));
}

uint32_t PageTable::AddPartition(std::unique_ptr<EvictionPolicy> policy) {
  partitions_.push_back({std::move(policy), {}});
  return partitions() - 1;
}

void PageTable::SetPartition(const KeyspaceId& keyspace, uint32_t partition) {
  MakeSpace(keyspace).partition = partition;
}

uint32_t PageTable::PartitionOf(const KeyspaceId& keyspace) const {
  const Space* space = SpaceOf(keyspace);
  return space == nullptr ? 0 : space->partition;
}

PageTable::Space& PageTable::MakeSpace(const KeyspaceId& keyspace) {
  auto& space = spaces_[keyspace];
  if (space == nullptr) space = std::make_unique<Space>();
  return *space;
}

PageTable::PageTable(std::unique_ptr<EvictionPolicy> policy, SlotSpace& space)
    : slots_(space),
      inherited_(nullptr),
      losses_(nullptr),
      lifetime_seconds_(LifetimeBounds()),
      reuse_seconds_(SnapshotOf(lifetime_seconds_)) {
  AddPartition(std::move(policy));
}

PageTable::Space* PageTable::SpaceOf(const KeyspaceId& keyspace) const {
  const auto found = spaces_.find(keyspace);
  return found == spaces_.end() ? nullptr : found->second.get();
}

PageTable::View PageTable::ViewOf(const KeyspaceId& keyspace) const {
  return View(SpaceOf(keyspace));
}

PageHandle PageTable::Find(const KeyspaceId& keyspace, const PageKey& key) const {
  return ViewOf(keyspace).Find(key);
}

void PageTable::FindEach(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                         absl::FunctionRef<bool(size_t, PageHandle)> visit) const {
  const View view = ViewOf(keyspace);
  std::array<KeyIndex::Hashed, kPrefetchAhead> ahead;  // the next keys, by index modulo its size
  const auto look_ahead = [&](size_t i) {
    if (i >= keys.size()) return;
    ahead[i % kPrefetchAhead] = KeyIndex::Hash(keys[i]);
    view.Prefetch(ahead[i % kPrefetchAhead]);
  };
  for (size_t i = 0; i < kPrefetchAhead; ++i) look_ahead(i);
  for (size_t i = 0; i < keys.size(); ++i) {
    const PageHandle found = view.Find(ahead[i % kPrefetchAhead]);
    look_ahead(i + kPrefetchAhead);
    if (!visit(i, found)) return;
  }
}

absl::Status PageTable::CanInsert(const FragmentMeta& meta) const {
  if (meta.generation < GenerationOf(meta.keyspace)) {
    return absl::AbortedError("the fragment's generation was dropped");
  }
  const PageHandle handle = Find(meta.keyspace, meta.key);
  if (handle == kNoPage || pages_[handle].generation < meta.generation) return absl::OkStatus();
  if (meta.generation < pages_[handle].generation) {
    return absl::AbortedError("a newer generation of the page is there");
  }
  for (const Fragment& fragment : pages_[handle].fragments) {
    if (Overlaps(fragment.range, meta.range)) {
      return absl::AlreadyExistsError("tiles of the fragment are there already");
    }
  }
  if (pages_[handle].fragments.size() >= page_fragments_max_) {
    return absl::ResourceExhaustedError("the page has " + std::to_string(page_fragments_max_) +
                                        " fragments, store.page_fragments_max allows no more");
  }
  return absl::OkStatus();
}

absl::StatusOr<PageHandle> PageTable::Insert(const FragmentMeta& meta, const Slot& slot,
                                             Below below, bool owed, TimePoint now) {
  CRUMB_RETURN_IF_ERROR(CanInsert(meta));
  Space* const space = &MakeSpace(meta.keyspace);
  PageHandle handle = Find(meta.keyspace, meta.key);
  if (handle != kNoPage && pages_[handle].generation < meta.generation) {
    Remove(handle, RemovalReason::kDeleted, now);
    handle = kNoPage;
  }
  if (handle == kNoPage) handle = AddPage(*space, meta, now);
  pages_[handle].fragments.push_back({.range = meta.range,
                                      .tiles_bytes = meta.tiles_bytes,
                                      .bytes = meta.bytes,
                                      .logical_tile_bytes = meta.logical_tile_bytes,
                                      .below = below,
                                      .owed = owed,
                                      .slot = slot});
  ++fragments_;
  SetSlotOwner(slot, handle);
  NoteInserted(pages_[handle], meta, slot, below);
  space->bytes += meta.bytes;
  stats_.resident_logical_bytes += meta.logical_bytes();
  stats_.waste_bytes += slot.bytes - meta.bytes;
  return handle;
}

PageHandle PageTable::AddPage(Space& space, const FragmentMeta& meta, TimePoint now) {
  auto handle = static_cast<PageHandle>(pages_.size());
  if (free_pages_.empty()) {
    pages_.Append();
  } else {
    handle = free_pages_.back();
    free_pages_.pop_back();
  }
  const ForestHandle place = TakePlace(space, meta.key);
  const ForestHandle parent = ParentPlace(space, meta, place);
  const PageHandle parent_page = parent == kNoForestNode ? kNoPage : places_[parent].page;
  TenantPartition& partition = partitions_[space.partition];
  const ItemHandle item = partition.policy->Insert(
      {.fingerprint = FingerprintOf(meta.key),
       .parent = parent_page == kNoPage ? kNoItem : pages_[parent_page].item,
       .has_children = places_[place].first_child != kNoForestNode});
  partition.page_of_item.GrowTo(item + size_t{1});
  partition.page_of_item[item] = handle;
  Page& page = pages_[handle];
  page.partition = space.partition;
  page.space = &space;
  page.references = page.holds = 0;
  page.slots_bytes = 0;
  page.pinned = false;
  page.was_hit = page.recency_dirty = false;
  page.access = 0;
  page.pinned_until = TimePoint();
  page.keyspace = meta.keyspace;
  page.key = meta.key;
  page.parent = meta.parent;
  page.generation = meta.generation;
  page.resident = true;
  page.item = item;
  page.place = place;
  page.added = page.used = now;
  space.pages.Insert(meta.key, handle);
  places_[place].page = handle;
  if (parent != kNoForestNode) LinkPlace(place, parent);
  changes_.push_back({meta.keyspace, meta.key, true});
  ++stats_.pages;
  return handle;
}

void PageTable::SetSlotOwner(const Slot& slot, PageHandle page) {
  IsInherited(slot) ? inherited_->SetOwner(slot, page) : slots_.SetOwner(slot, page);
}

void PageTable::FreeSlot(const Slot& slot) {
  IsInherited(slot) ? inherited_->Free(slot) : slots_.Free(slot);
}

void PageTable::MoveFragment(PageHandle handle, const TileRange& range, const Slot& slot) {
  for (Fragment& fragment : pages_[handle].fragments) {
    if (fragment.range != range) continue;
    stats_.waste_bytes += slot.bytes;
    stats_.waste_bytes -= fragment.slot.bytes;
    Page& page = pages_[handle];
    page.slots_bytes += slot.bytes;
    page.slots_bytes -= fragment.slot.bytes;
    if (IsHeld(page)) {
      held_.Add(page.space->held, slot.bytes);
      held_.Give(page.space->held, fragment.slot.bytes);
    }
    FreeSlot(std::exchange(fragment.slot, slot));
    SetSlotOwner(slot, handle);
  }
}

bool PageTable::HasOwnSlot(const Page& page) const {
  return std::any_of(page.fragments.begin(), page.fragments.end(),
                     [this](const Fragment& fragment) { return !IsInherited(fragment.slot); });
}

void PageTable::Remove(PageHandle handle, RemovalReason reason, TimePoint now) {
  Page& page = pages_[handle];
  Space& space = *page.space;
  CountRemoval(page, reason, now);
  LeavePin(page);
  space.pages.Erase(page.key);
  partitions_[page.partition].policy->Remove(
      page.item, reason == RemovalReason::kCapacity ? Removal::kEvicted : Removal::kDeleted);
  LeavePlace(space, page);
  page.item = kNoItem;
  page.place = kNoForestNode;
  page.resident = false;
  changes_.push_back({page.keyspace, page.key, false});
  if (page.references == 0) FreeSlots(handle);
}

void PageTable::CountRemoval(const Page& page, RemovalReason reason, TimePoint now) {
  --stats_.pages;
  fragments_ -= page.fragments.size();
  for (const Fragment& fragment : page.fragments) {
    stats_.resident_logical_bytes -=
        static_cast<uint64_t>(fragment.range.tiles()) * fragment.logical_tile_bytes;
  }
  lifetime_seconds_.Observe(Seconds(now - page.added));
  const bool orphan = page.parent != PageKey{} && Find(page.keyspace, page.parent) == kNoPage;
  switch (reason) {
    case RemovalReason::kCapacity:
      if (losses_ != nullptr && std::any_of(page.fragments.begin(), page.fragments.end(), IsLost)) {
        losses_->Add(page.keyspace);
      }
      ++(orphan ? stats_.evicted.ancestor : stats_.evicted.capacity);
      break;
    case RemovalReason::kDeleted:
      ++stats_.evicted.deleted;
      break;
    case RemovalReason::kCorrupt:
      ++stats_.evicted.corrupt;
      break;
  }
}

void PageTable::FreeSlots(PageHandle handle) {
  Page& page = pages_[handle];
  for (const Fragment& fragment : page.fragments) {
    stats_.waste_bytes -= fragment.slot.bytes - fragment.bytes;
    page.space->bytes -= fragment.bytes;
    FreeSlot(fragment.slot);
  }
  page.fragments.clear();
  free_pages_.push_back(handle);
}

void PageTable::Unref(PageHandle handle) {
  Page& page = pages_[handle];
  --references_;
  if (--page.references == 0 && !page.resident) FreeSlots(handle);
}

void PageTable::Hit(PageHandle handle) {
  const Page& page = pages_[handle];
  if (page.resident) partitions_[page.partition].policy->Hit(page.item);
}

// Pages of a prefix were mostly read together before, too.
void PageTable::NoteRead(std::span<const PageHandle> pages, TimePoint now) {
  TimePoint before;
  uint64_t alike = 0;
  const auto observe = [&] {
    if (alike > 0) Observe(reuse_seconds_, Seconds(now - before), alike);
    alike = 0;
  };
  for (const PageHandle handle : pages) {
    Page& page = pages_[handle];
    if (page.used != before) observe();
    before = page.used;
    ++alike;
    page.used = now;
    page.was_hit = true;
  }
  observe();
}

std::optional<PageHandle> PageTable::Victim(TimePoint now,
                                            absl::FunctionRef<bool(const Page&)> may_go,
                                            uint32_t partition, size_t& steps) {
  const ChunkedVector<PageHandle>& page_of_item = partitions_[partition].page_of_item;
  const auto is_pinned = [&](ItemHandle item) {
    const Page& page = pages_[page_of_item[item]];
    return page.references > 0 || page.pinned_until > now || !may_go(page);
  };
  const std::optional<ItemHandle> item =
      partitions_[partition].policy->FindVictim(is_pinned, steps);
  if (!item) return std::nullopt;
  return page_of_item[*item];
}

std::vector<PageHandle> PageTable::PagesOlderThan(const KeyspaceId& keyspace, uint64_t generation,
                                                  size_t limit) const {
  std::vector<PageHandle> found;
  const Space* space = SpaceOf(keyspace);
  if (space == nullptr) return found;
  space->pages.ForEach([&](PageHandle handle) {
    if (pages_[handle].generation < generation) found.push_back(handle);
    return found.size() < limit;
  });
  return found;
}

void PageTable::ForEachPage(const KeyspaceId& keyspace,
                            absl::FunctionRef<void(const Page&)> visit) const {
  const Space* space = SpaceOf(keyspace);
  if (space == nullptr) return;
  space->pages.ForEach([&](PageHandle handle) {
    visit(pages_[handle]);
    return true;
  });
}

PageHandle PageTable::Scan(const KeyspaceId& keyspace, PageHandle from, size_t count,
                           absl::FunctionRef<void(PageHandle, const Page&)> visit) const {
  const Space* space = SpaceOf(keyspace);
  if (space == nullptr) return kNoPage;
  if (from == 0 && space->pages.size() <= count) {
    space->pages.ForEach([&](PageHandle handle) {
      visit(handle, pages_[handle]);
      return true;
    });
    return kNoPage;
  }
  const size_t end = std::min(pages_.size(), from + count);
  for (size_t handle = from; handle < end; ++handle) {
    const Page& page = pages_[handle];
    if (page.resident && page.keyspace == keyspace) visit(static_cast<PageHandle>(handle), page);
  }
  return end == pages_.size() ? kNoPage : static_cast<PageHandle>(end);
}

void PageTable::ForEachPage(absl::FunctionRef<void(PageHandle, const Page&)> visit) const {
  for (const auto& [id, space] : spaces_) {
    space->pages.ForEach([&](PageHandle handle) {
      visit(handle, pages_[handle]);
      return true;
    });
  }
}

void PageTable::RaiseGeneration(const KeyspaceId& keyspace, uint64_t generation) {
  Space& space = MakeSpace(keyspace);
  space.generation = std::max(space.generation, generation);
}

uint64_t PageTable::GenerationOf(const KeyspaceId& keyspace) const {
  const Space* space = SpaceOf(keyspace);
  return space == nullptr ? 0 : space->generation;
}

std::vector<std::pair<KeyspaceId, uint64_t>> PageTable::Generations() const {
  std::vector<std::pair<KeyspaceId, uint64_t>> generations;
  for (const auto& [id, space] : spaces_) {
    if (space->generation > 0) generations.emplace_back(id, space->generation);
  }
  return generations;
}

uint64_t PageTable::BytesOf(const KeyspaceId& keyspace) const {
  const Space* space = SpaceOf(keyspace);
  return space == nullptr ? 0 : space->bytes;
}

uint64_t PageTable::PagesOf(const KeyspaceId& keyspace) const {
  const Space* space = SpaceOf(keyspace);
  return space == nullptr ? 0 : space->pages.size();
}

std::vector<PageTable::Change> PageTable::TakeChanges() { return std::exchange(changes_, {}); }

void PageTable::CountPut(const FragmentMeta& meta) {
  stats_.logical_put_bytes += meta.logical_bytes();
  stats_.stored_put_bytes += meta.bytes;
}

void PageTable::CountGet(const FragmentMeta& meta) {
  stats_.logical_get_bytes += meta.logical_bytes();
  stats_.stored_get_bytes += meta.bytes;
}

TierStats PageTable::Stats() const {
  TierStats stats = stats_;
  stats.capacity_bytes = slots_.capacity_bytes();
  stats.resident_bytes = slots_.used_bytes();
  stats.waste_bytes += slots_.waste_bytes();
  if (inherited_ != nullptr) {
    stats.capacity_bytes += inherited_->held_bytes();
    stats.resident_bytes += inherited_->used_bytes();
  }
  stats.page_lifetime_seconds = SnapshotOf(lifetime_seconds_);
  stats.reuse_gap_seconds = reuse_seconds_;
  return stats;
}

FragmentMeta PageTable::MetaOf(const Page& page, const Fragment& fragment) const {
  return {.keyspace = page.keyspace,
          .key = page.key,
          .parent = page.parent,
          .generation = page.generation,
          .range = fragment.range,
          .tiles_bytes = fragment.tiles_bytes,
          .bytes = fragment.bytes,
          .logical_tile_bytes = fragment.logical_tile_bytes};
}

}  // namespace crumb::storage
