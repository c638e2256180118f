// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device_pool_index.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace crumb::storage {
namespace {

bool SameFragment(const FragmentHeader& a, const FragmentHeader& b) {
  return a.keyspace == b.keyspace && a.key == b.key && a.generation == b.generation &&
         a.range == b.range;
}

}  // namespace

DevicePoolIndex::DevicePoolIndex(std::unique_ptr<EvictionPolicy> policy, uint32_t slot_bytes,
                                 uint64_t handle_bytes, bool recovering)
    : slots_(slot_bytes, handle_bytes),
      table_(std::move(policy), slots_),
      recovering_(recovering) {}

bool DevicePoolIndex::AddHandle(uint32_t number) {
  const auto fresh = recovering_ ? UniformSlots::Fresh::kUnknown : UniformSlots::Fresh::kFree;
  if (!slots_.AddHandle(number, fresh)) return false;
  const uint64_t slots = (uint64_t{number} + 1) * (slots_.total() / slots_.handles());
  if (headers_.size() < slots) {
    headers_.resize(slots);
    pages_.resize(slots, kNoPage);
  }
  return true;
}

void DevicePoolIndex::EndRecovery() {
  recovering_ = false;
  slots_.FreeUnknown();
}

bool DevicePoolIndex::Holds(HolderId holder, uint64_t slot) const {
  const auto holds = holds_.find(holder);
  return holds != holds_.end() && holds->second.contains(slot);
}

void DevicePoolIndex::Keep(HolderId holder, uint64_t slot) {
  holds_[holder].insert(slot);
  ++held_;
}

size_t DevicePoolIndex::HoldersOf(uint64_t blank) const {
  const auto shared = shared_.find(blank);
  return shared == shared_.end() ? 1 : shared->second;
}

std::optional<uint64_t> DevicePoolIndex::TakeBlank(HolderId holder) {
  const std::optional<uint64_t> slot = slots_.Take();
  if (!slot) return std::nullopt;
  pages_[*slot] = kNoPage;
  ++blank_;
  Keep(holder, *slot);
  return slot;
}

absl::StatusOr<PageHandle> DevicePoolIndex::Insert(
    uint64_t slot, const std::shared_ptr<const FragmentHeader>& header, uint32_t logical_tile_bytes,
    TimePoint now) {
  const auto tiles_bytes =
      static_cast<uint32_t>(FragmentTilesBytes(header->range.tiles(), header->tile_bytes));
  const Slot at = slots_.At(slot);
  if (tiles_bytes > at.bytes) {
    return absl::InvalidArgumentError("the fragment is larger than the pool's slots");
  }
  const FragmentMeta meta = {.keyspace = header->keyspace,
                             .key = header->key,
                             .parent = header->parent,
                             .generation = header->generation,
                             .range = header->range,
                             .tiles_bytes = tiles_bytes,
                             .bytes = tiles_bytes,
                             .logical_tile_bytes = logical_tile_bytes};
  CRUMB_ASSIGN_OR_RETURN(const PageHandle page, table_.Insert(meta, at, Below::kAbsent, now));
  headers_[slot] = header;
  pages_[slot] = page;
  --blank_;
  table_.CountPut(meta);
  return page;
}

absl::Status DevicePoolIndex::Commit(HolderId holder, uint64_t slot,
                                     const std::shared_ptr<const FragmentHeader>& header,
                                     uint32_t logical_tile_bytes, TimePoint now) {
  if (!Holds(holder, slot) || pages_[slot] != kNoPage || HoldersOf(slot) > 1) {
    return absl::InvalidArgumentError("slots: " + std::to_string(slot) + " is not reserved");
  }
  table_.BeginAccess();
  CRUMB_ASSIGN_OR_RETURN(const PageHandle page, Insert(slot, header, logical_tile_bytes, now));
  table_.Ref(page);
  return absl::OkStatus();
}

bool DevicePoolIndex::Claim(HolderId holder, uint64_t slot,
                            const std::shared_ptr<const FragmentHeader>& header,
                            uint32_t logical_tile_bytes, TimePoint now) {
  if (!recovering_ || !slots_.Has(slot)) return false;
  const bool first = slots_.TakeAt(slot);
  if (first) {
    pages_[slot] = kNoPage;
    ++blank_;
  }
  if (header != nullptr && pages_[slot] == kNoPage) {
    const size_t holders = first ? 0 : HoldersOf(slot);
    // A page that cannot be known here stays the holders' own.
    if (const auto page = Insert(slot, header, logical_tile_bytes, now); page.ok()) {
      for (size_t i = 0; i < holders; ++i) table_.Ref(*page);
      shared_.erase(slot);
    }
  } else if (header != nullptr && !SameFragment(*header, *headers_[slot])) {
    return false;
  }
  if (Holds(holder, slot)) return true;
  if (pages_[slot] != kNoPage) {
    table_.Ref(pages_[slot]);
  } else if (!first) {
    shared_[slot] = HoldersOf(slot) + 1;
  }
  Keep(holder, slot);
  return true;
}

std::shared_ptr<const FragmentHeader> DevicePoolIndex::PageAt(uint64_t slot) const {
  if (!slots_.Taken(slot) || pages_[slot] == kNoPage) return nullptr;
  return headers_[slot];
}

bool DevicePoolIndex::Withdraw(uint64_t slot, const PageKey& key, TimePoint now) {
  const auto header = PageAt(slot);
  if (header == nullptr || header->key != key) return false;
  const PageHandle page = table_.Find(header->keyspace, key);
  // A page that was removed has its slots still; the one of its key may lie elsewhere by now.
  if (page == kNoPage || page != pages_[slot]) return false;
  table_.Remove(page, RemovalReason::kCorrupt, now);
  return true;
}

void DevicePoolIndex::LetGo(uint64_t slot) {
  --held_;
  if (pages_[slot] != kNoPage) {
    table_.Unref(pages_[slot]);
  } else if (const auto shared = shared_.find(slot); shared != shared_.end()) {
    if (--shared->second == 1) shared_.erase(shared);
  } else {
    --blank_;
    slots_.Free(slot);
  }
}

bool DevicePoolIndex::Release(HolderId holder, uint64_t slot) {
  const auto holds = holds_.find(holder);
  if (holds == holds_.end() || holds->second.erase(slot) == 0) return false;
  if (holds->second.empty()) holds_.erase(holds);
  LetGo(slot);
  return true;
}

size_t DevicePoolIndex::ReleaseAll(HolderId holder) {
  const auto holds = holds_.find(holder);
  if (holds == holds_.end()) return 0;
  const auto held = std::move(holds->second);
  holds_.erase(holds);
  for (const uint64_t slot : held) LetGo(slot);
  return held.size();
}

size_t DevicePoolIndex::ReleaseAllBut(HolderId holder, std::span<const uint64_t> kept) {
  const auto holds = holds_.find(holder);
  if (holds == holds_.end()) return 0;
  std::vector<uint64_t> stay(kept.begin(), kept.end());
  std::sort(stay.begin(), stay.end());
  std::vector<uint64_t> gone;
  for (const uint64_t slot : holds->second) {
    if (!std::binary_search(stay.begin(), stay.end(), slot)) gone.push_back(slot);
  }
  for (const uint64_t slot : gone) Release(holder, slot);
  return gone.size();
}

size_t DevicePoolIndex::HeldBy(HolderId holder) const {
  const auto holds = holds_.find(holder);
  return holds == holds_.end() ? 0 : holds->second.size();
}

std::optional<PageHandle> DevicePoolIndex::ParentToLeave(PageHandle child, TimePoint now) const {
  if (child == kNoPage) return std::nullopt;
  const auto parent =
      table_.ParentLeftBy(child, [this](PageHandle sibling) { return leaving_.contains(sibling); });
  if (!parent) return std::nullopt;
  const Page& page = table_[*parent];
  const bool idle = page.references == 0 && page.pinned_until <= now;
  if (!idle || page.used > table_[child].used) return std::nullopt;
  return parent;
}

std::optional<PageHandle> DevicePoolIndex::BeginDeparture(PageHandle child, TimePoint now) {
  if (recovering_) return std::nullopt;
  std::optional<PageHandle> page = ParentToLeave(child, now);
  if (!page) page = table_.Victim(now, [](const Page&) { return true; });
  if (!page) return std::nullopt;
  table_.Ref(*page);
  leaving_.insert(*page);
  return page;
}

void DevicePoolIndex::EndDeparture(PageHandle page, Departed departed, TimePoint now) {
  leaving_.erase(page);
  // Somebody may have leased it meanwhile: then it is worth keeping.
  const bool ours_alone = table_[page].references == 1;
  if (departed == Departed::kGone && ours_alone && table_[page].resident) {
    table_.Remove(page, RemovalReason::kCapacity, now);
  }
  table_.Unref(page);
}

std::vector<DemotionWork> DevicePoolIndex::Demote(PageHandle page, HolderId holder) {
  std::vector<DemotionWork> work;
  for (const Fragment& fragment : table_[page].fragments) {
    const uint64_t slot = slots_.NumberOf(fragment.slot);
    demoting_[slot] = {page, holder};
    work.push_back({slot, headers_[slot]});
  }
  return work;
}

bool DevicePoolIndex::ForgetDemotion(PageHandle page, HolderId holder) {
  return absl::erase_if(demoting_, [&](const auto& entry) {
           return entry.second.page == page && entry.second.by == holder;
         }) > 0;
}

std::optional<FragmentMeta> DevicePoolIndex::DemotingAt(HolderId holder, uint64_t slot) const {
  const auto found = demoting_.find(slot);
  if (found == demoting_.end() || found->second.by != holder) return std::nullopt;
  const Page& page = table_[found->second.page];
  for (const Fragment& fragment : page.fragments) {
    if (slots_.NumberOf(fragment.slot) == slot) return table_.MetaOf(page, fragment);
  }
  return std::nullopt;
}

bool DevicePoolIndex::Demoted(HolderId holder, uint64_t slot, TimePoint now) {
  const auto found = demoting_.find(slot);
  if (found == demoting_.end() || found->second.by != holder) return false;
  const PageHandle page = found->second.page;
  demoting_.erase(found);
  for (const Fragment& fragment : table_[page].fragments) {
    if (demoting_.contains(slots_.NumberOf(fragment.slot))) return true;  // not the last
  }
  EndDeparture(page, Departed::kGone, now);
  return true;
}

size_t DevicePoolIndex::DropDemotions(HolderId holder, TimePoint now) {
  std::vector<uint64_t> slots;
  for (const auto& [slot, demoting] : demoting_) {
    if (demoting.by == holder) slots.push_back(slot);
  }
  for (const uint64_t slot : slots) Demoted(holder, slot, now);
  return slots.size();
}

}  // namespace crumb::storage
