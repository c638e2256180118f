// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device_pool_index.h"

#include <utility>

#include "common/status_macros.h"

namespace crumb::storage {

DevicePoolIndex::DevicePoolIndex(std::unique_ptr<EvictionPolicy> policy, uint32_t slot_bytes,
                                 uint64_t handle_bytes, bool recovering)
    : slots_(slot_bytes, handle_bytes),
      table_(std::move(policy), slots_),
      recovering_(recovering) {}

bool DevicePoolIndex::AddHandle(uint32_t number) {
  const auto fresh = recovering_ ? UniformSlots::Fresh::kUnknown : UniformSlots::Fresh::kFree;
  if (!slots_.AddHandle(number, fresh)) return false;
  const uint64_t slots = (uint64_t{number} + 1) * (slots_.total() / slots_.handles());
  if (headers_.size() < slots) headers_.resize(slots);
  return true;
}

void DevicePoolIndex::EndRecovery() {
  recovering_ = false;
  slots_.FreeUnknown();
}

void DevicePoolIndex::Keep(HolderId holder, uint64_t slot, PageHandle page) {
  holds_[holder][slot] = page;
  ++held_;
  if (page == kNoPage) ++blank_;
}

std::optional<uint64_t> DevicePoolIndex::TakeBlank(HolderId holder) {
  const std::optional<uint64_t> slot = slots_.Take();
  if (slot) Keep(holder, *slot, kNoPage);
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
  table_.CountPut(meta);
  return page;
}

absl::Status DevicePoolIndex::Commit(HolderId holder, uint64_t slot,
                                     const std::shared_ptr<const FragmentHeader>& header,
                                     uint32_t logical_tile_bytes, TimePoint now) {
  const auto holds = holds_.find(holder);
  if (holds == holds_.end()) return absl::InvalidArgumentError("slots: none is reserved");
  const auto hold = holds->second.find(slot);
  if (hold == holds->second.end() || hold->second != kNoPage) {
    return absl::InvalidArgumentError("slots: " + std::to_string(slot) + " is not reserved");
  }
  table_.BeginAccess();
  CRUMB_ASSIGN_OR_RETURN(const PageHandle page, Insert(slot, header, logical_tile_bytes, now));
  table_.Ref(page);
  hold->second = page;
  --blank_;
  return absl::OkStatus();
}

std::optional<PageHandle> DevicePoolIndex::PageAt(uint64_t slot,
                                                  const FragmentHeader& header) const {
  const PageHandle page = table_.Find(header.keyspace, header.key);
  if (page == kNoPage || table_[page].generation != header.generation) return std::nullopt;
  for (const Fragment& fragment : table_[page].fragments) {
    if (slots_.NumberOf(fragment.slot) == slot && fragment.range == header.range) return page;
  }
  return std::nullopt;
}

bool DevicePoolIndex::Claim(HolderId holder, uint64_t slot,
                            const std::shared_ptr<const FragmentHeader>& header,
                            uint32_t logical_tile_bytes, TimePoint now) {
  if (!slots_.Has(slot)) return false;
  if (const auto holds = holds_.find(holder);
      holds != holds_.end() && holds->second.contains(slot)) {
    return false;
  }
  if (slots_.TakeAt(slot)) {
    PageHandle page = kNoPage;
    if (header != nullptr) {
      // A page that cannot be known here stays the holder's own.
      const auto inserted = Insert(slot, header, logical_tile_bytes, now);
      if (inserted.ok()) table_.Ref(page = *inserted);
    }
    Keep(holder, slot, page);
    return true;
  }
  const auto page = header == nullptr ? std::nullopt : PageAt(slot, *header);
  if (!page) return false;
  table_.Ref(*page);
  Keep(holder, slot, *page);
  return true;
}

void DevicePoolIndex::LetGo(uint64_t slot, PageHandle page) {
  --held_;
  if (page == kNoPage) {
    --blank_;
    slots_.Free(slot);
  } else {
    table_.Unref(page);
  }
}

bool DevicePoolIndex::Release(HolderId holder, uint64_t slot) {
  const auto holds = holds_.find(holder);
  if (holds == holds_.end()) return false;
  const auto hold = holds->second.find(slot);
  if (hold == holds->second.end()) return false;
  const PageHandle page = hold->second;
  holds->second.erase(hold);
  if (holds->second.empty()) holds_.erase(holds);
  LetGo(slot, page);
  return true;
}

size_t DevicePoolIndex::ReleaseAll(HolderId holder) {
  const auto holds = holds_.find(holder);
  if (holds == holds_.end()) return 0;
  const Holds held = std::move(holds->second);
  holds_.erase(holds);
  for (const auto& [slot, page] : held) LetGo(slot, page);
  return held.size();
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
