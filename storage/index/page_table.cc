// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/page_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/status_macros.h"
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

}  // namespace

HistogramSnapshot SnapshotOf(const Histogram& histogram) {
  HistogramSnapshot snapshot;
  snapshot.bounds.assign(histogram.bounds().begin(), histogram.bounds().end());
  for (size_t i = 0; i <= snapshot.bounds.size(); ++i) {
    snapshot.counts.push_back(histogram.bucket(i));
  }
  snapshot.sum = histogram.sum();
  return snapshot;
}

PageTable::PageTable(std::unique_ptr<EvictionPolicy> policy, SlotSpace& slots, LossLedger* losses)
    : slots_(slots),
      losses_(losses),
      order_(std::move(policy), pages_),
      held_(pages_),
      lifetime_seconds_(LifetimeBounds()),
      reuse_seconds_(SnapshotOf(lifetime_seconds_)) {}

absl::Status PageTable::CanInsert(const FragmentMeta& meta) const {
  if (meta.generation < pages_.GenerationOf(meta.keyspace)) {
    return absl::AbortedError("the fragment's generation was dropped");
  }
  const PageHandle handle = pages_.Find(meta.keyspace, meta.key);
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
  PageSpace& space = pages_.MakeSpace(meta.keyspace);
  PageHandle handle = pages_.Find(meta.keyspace, meta.key);
  if (handle != kNoPage && pages_[handle].generation < meta.generation) {
    Remove(handle, RemovalReason::kDeleted, now);
    handle = kNoPage;
  }
  if (handle == kNoPage) {
    handle = pages_.Add(space, meta, now);
    order_.Add(handle);
    changes_.push_back({meta.keyspace, meta.key, true});
  }
  pages_.AddFragment(handle, {.range = meta.range,
                              .tiles_bytes = meta.tiles_bytes,
                              .bytes = meta.bytes,
                              .logical_tile_bytes = meta.logical_tile_bytes,
                              .below = below,
                              .owed = owed,
                              .slot = slot});
  slots_.SetOwner(slot, handle);
  held_.NoteInserted(pages_[handle], meta, slot, below);
  stats_.resident_logical_bytes += meta.logical_bytes();
  stats_.waste_bytes += slot.bytes - meta.bytes;
  return handle;
}

void PageTable::MoveFragment(PageHandle handle, const TileRange& range, const Slot& slot) {
  for (Fragment& fragment : pages_[handle].fragments) {
    if (fragment.range != range) continue;
    stats_.waste_bytes += slot.bytes;
    stats_.waste_bytes -= fragment.slot.bytes;
    held_.NoteMoved(pages_[handle], fragment.slot, slot);
    slots_.Free(std::exchange(fragment.slot, slot));
    slots_.SetOwner(slot, handle);
  }
}

void PageTable::Remove(PageHandle handle, RemovalReason reason, TimePoint now) {
  Page& page = pages_[handle];
  CountRemoval(page, reason, now);
  held_.LeavePin(page);
  pages_.Hide(handle);
  order_.Remove(handle, reason == RemovalReason::kCapacity ? Removal::kEvicted : Removal::kDeleted);
  changes_.push_back({page.keyspace, page.key, false});
  if (page.references == 0) FreeSlots(handle);
}

void PageTable::CountRemoval(const Page& page, RemovalReason reason, TimePoint now) {
  for (const Fragment& fragment : page.fragments) {
    stats_.resident_logical_bytes -= fragment.logical_bytes();
  }
  lifetime_seconds_.Observe(Seconds(now - page.added));
  const bool orphan =
      page.parent != PageKey{} && pages_.Find(page.keyspace, page.parent) == kNoPage;
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
  for (const Fragment& fragment : pages_[handle].fragments) {
    stats_.waste_bytes -= fragment.slot.bytes - fragment.bytes;
    slots_.Free(fragment.slot);
  }
  pages_.Recycle(handle);
}

void PageTable::Unref(PageHandle handle) {
  Page& page = pages_[handle];
  --references_;
  if (--page.references == 0 && !page.resident) FreeSlots(handle);
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

void PageTable::RaiseGeneration(const KeyspaceId& keyspace, uint64_t generation) {
  PageSpace& space = pages_.MakeSpace(keyspace);
  space.generation = std::max(space.generation, generation);
}

std::vector<PageTable::Change> PageTable::TakeChanges() { return std::exchange(changes_, {}); }

void PageTable::CountPut(const FragmentMeta& meta) {
  stats_.logical_put_bytes += meta.logical_bytes();
  stats_.stored_put_bytes += meta.bytes;
}

TierStats PageTable::Stats() const {
  TierStats stats = stats_;
  stats.pages = pages_.size();
  stats.capacity_bytes = slots_.capacity_bytes();
  stats.resident_bytes = slots_.used_bytes();
  stats.waste_bytes += slots_.waste_bytes();
  stats.page_lifetime_seconds = SnapshotOf(lifetime_seconds_);
  stats.reuse_gap_seconds = reuse_seconds_;
  return stats;
}

}  // namespace crumb::storage
