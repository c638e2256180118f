// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/device_pool_index.h"

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
    : slots_(slot_bytes, handle_bytes, recovering),
      table_(std::move(policy), slots_),
      departures_(table_, slots_) {}

bool DevicePoolIndex::AddHandle(uint32_t number, HandleRoom room) {
  if (!slots_.AddHandle(number, std::move(room.states))) return false;
  if (slot_pages_.size() <= number) slot_pages_.resize(size_t{number} + 1);
  slot_pages_[number] = {std::move(room.headers), std::move(room.pages)};
  return true;
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

void DevicePoolIndex::Remove(PageHandle page, RemovalReason reason, TimePoint now) {
  if (removed_marks_ && table_[page].references > 0) {
    for (const Fragment& fragment : table_[page].fragments) {
      removed_marks_->Set(slots_.NumberOf(fragment.slot));
    }
  }
  table_.Remove(page, reason, now);
}

std::optional<uint64_t> DevicePoolIndex::TakeBlank(HolderId holder) {
  const std::optional<uint64_t> slot = slots_.Take();
  if (!slot) return std::nullopt;
  PageOf(*slot) = kNoPage;
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
  CRUMB_ASSIGN_OR_RETURN(const PageHandle page,
                         table_.Insert(meta, at, Below::kAbsent, /*owed=*/false, now));
  HeaderOf(slot) = header;
  PageOf(slot) = page;
  --blank_;
  table_.CountPut(meta);
  return page;
}

absl::Status DevicePoolIndex::Commit(HolderId holder, uint64_t slot,
                                     const std::shared_ptr<const FragmentHeader>& header,
                                     uint32_t logical_tile_bytes, TimePoint now) {
  if (!Holds(holder, slot) || PageOf(slot) != kNoPage || HoldersOf(slot) > 1) {
    return absl::InvalidArgumentError("slots: " + std::to_string(slot) + " is not reserved");
  }
  table_.order().BeginAccess();
  const absl::StatusOr<PageHandle> page = Insert(slot, header, logical_tile_bytes, now);
  if (!page.ok()) {
    MarkRemoved(slot);
    return page.status();
  }
  if (removed_marks_) removed_marks_->Clear(slot);
  table_.Ref(*page);
  return absl::OkStatus();
}

bool DevicePoolIndex::Claim(HolderId holder, uint64_t slot,
                            std::shared_ptr<const FragmentHeader> header,
                            uint32_t logical_tile_bytes, TimePoint now) {
  if (!slots_.recovering() || !slots_.Has(slot)) return false;
  if (removed_marks_ && removed_marks_->Has(slot)) header = nullptr;
  const bool first = slots_.TakeAt(slot);
  if (first) {
    PageOf(slot) = kNoPage;
    ++blank_;
  }
  if (header != nullptr && PageOf(slot) == kNoPage) {
    const size_t holders = first ? 0 : HoldersOf(slot);
    if (const auto page = Insert(slot, header, logical_tile_bytes, now); page.ok()) {
      for (size_t i = 0; i < holders; ++i) table_.Ref(*page);
      shared_.erase(slot);
    } else {
      // A page that cannot be known here stays the holders' own. Its deletion finds no page in this
      // slot, so the slot is marked now.
      MarkRemoved(slot);
    }
  } else if (header != nullptr && !SameFragment(*header, *HeaderOf(slot))) {
    return false;
  }
  if (Holds(holder, slot)) return true;
  if (PageOf(slot) != kNoPage) {
    table_.Ref(PageOf(slot));
  } else if (!first) {
    shared_[slot] = HoldersOf(slot) + 1;
  }
  Keep(holder, slot);
  return true;
}

std::shared_ptr<const FragmentHeader> DevicePoolIndex::PageAt(uint64_t slot) const {
  if (!slots_.Taken(slot) || PageOf(slot) == kNoPage) return nullptr;
  return HeaderOf(slot);
}

bool DevicePoolIndex::Withdraw(uint64_t slot, const PageKey& key, TimePoint now) {
  const auto header = PageAt(slot);
  if (header == nullptr || header->key != key) return false;
  const PageHandle page = table_.pages().Find(header->keyspace, key);
  // A page that was removed has its slots still; the one of its key may lie elsewhere by now.
  if (page == kNoPage || page != PageOf(slot)) return false;
  Remove(page, RemovalReason::kCorrupt, now);
  return true;
}

void DevicePoolIndex::LetGo(uint64_t slot) {
  --held_;
  if (PageOf(slot) != kNoPage) {
    table_.Unref(PageOf(slot));
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

std::vector<uint64_t> DevicePoolIndex::TakeHolds(HolderId holder) {
  std::vector<uint64_t> slots = HeldSlots(holder);
  holds_.erase(holder);
  return slots;
}

void DevicePoolIndex::EndHolds(std::span<const uint64_t> slots) {
  for (const uint64_t slot : slots) LetGo(slot);
}

std::vector<uint64_t> DevicePoolIndex::HeldSlots(HolderId holder) const {
  const auto holds = holds_.find(holder);
  if (holds == holds_.end()) return {};
  return {holds->second.begin(), holds->second.end()};
}

size_t DevicePoolIndex::HeldBy(HolderId holder) const {
  const auto holds = holds_.find(holder);
  return holds == holds_.end() ? 0 : holds->second.size();
}

}  // namespace crumb::storage
