// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The part of PageTable that counts the bytes that tenants keep from being reused.
#include <utility>

#include "storage/page_table.h"

namespace crumb::storage {

void PageTable::SetTenant(const KeyspaceId& keyspace, const std::string& tenant) {
  if (held_.bounded()) held_.SetTenant(MakeSpace(keyspace).held, tenant);
}

void PageTable::ForgetTenant(const KeyspaceId& keyspace) {
  const Space* space = SpaceOf(keyspace);
  if (space == nullptr || space->partition != 0 || space->generation != 0) return;
  if (space->bytes > 0 || space->held.bytes > 0) return;
  if (space->pages.size() > 0 || space->vacant.size() > 0) return;
  const auto pin = pins_.lower_bound({keyspace, PageKey()});
  if (pin != pins_.end() && pin->first.first == keyspace) return;
  spaces_.erase(keyspace);
}

bool PageTable::MayInsert(const FragmentMeta& meta, const Slot& slot, Below below) const {
  const Space* space = SpaceOf(meta.keyspace);
  if (!held_.bounded() || space == nullptr) return true;
  const PageHandle handle = Find(meta.keyspace, meta.key);
  const bool joins = handle != kNoPage && pages_[handle].generation == meta.generation;
  uint64_t added = joins && IsHeld(pages_[handle]) ? slot.bytes : 0;
  if (GrowsBelow(meta, joins ? &pages_[handle] : nullptr, below)) added += slot.bytes;
  return held_.Fits(space->held, added);
}

bool PageTable::GrowsBelow(const FragmentMeta& meta, const Page* page, Below below) const {
  if (pins_.empty() || below == Below::kStored || (page != nullptr && page->pinned)) return false;
  return pins_.contains({meta.keyspace, meta.key});
}

void PageTable::NoteInserted(Page& page, const FragmentMeta& meta, const Slot& slot, Below below) {
  if (GrowsBelow(meta, &page, below)) {
    pins_.at({meta.keyspace, meta.key}).bytes += slot.bytes;
    held_.Add(page.space->held, slot.bytes);
  }
  page.slots_bytes += slot.bytes;
  if (IsHeld(page)) held_.Add(page.space->held, slot.bytes);
}

bool PageTable::Pin(const KeyspaceId& keyspace, const PageKey& key, uint64_t below_bytes,
                    TimePoint until) {
  const PageHandle handle = Find(keyspace, key);
  Page* const page = handle == kNoPage ? nullptr : &pages_[handle];
  if (held_.bounded()) {
    Space& space = MakeSpace(keyspace);
    const uint64_t bytes = page == nullptr ? 0 : page->slots_bytes;
    const uint64_t beyond = below_bytes > bytes ? below_bytes - bytes : 0;
    const auto former = pins_.find({keyspace, key});
    const uint64_t noted = former == pins_.end() ? 0 : former->second.bytes;
    uint64_t added = page == nullptr || IsHeld(*page) ? 0 : bytes;
    if (beyond > noted) added += beyond - noted;
    if (!held_.Fits(space.held, added)) return false;
    if (former != pins_.end()) ErasePin(former);
    const auto pin = pins_.try_emplace({keyspace, key}, HeldPin{until, beyond, &space}).first;
    pin_ends_.emplace(until, pin->first);
    held_.Add(space.held, beyond);
    if (page != nullptr && !IsHeld(*page)) held_.Add(space.held, bytes);
    if (page != nullptr) page->pinned = true;
  }
  if (page != nullptr) page->pinned_until = until;
  return true;
}

void PageTable::Unpin(const KeyspaceId& keyspace, const PageKey& key) {
  const PageHandle handle = Find(keyspace, key);
  if (handle != kNoPage) {
    pages_[handle].pinned_until = TimePoint::min();
    ForgetPin(pages_[handle]);
  }
  const auto pin = pins_.find({keyspace, key});
  if (pin != pins_.end()) ErasePin(pin);
}

void PageTable::ForgetBelow(const KeyspaceId& keyspace, const PageKey& key) {
  if (pins_.empty()) return;
  const auto pin = pins_.find({keyspace, key});
  if (pin == pins_.end()) return;
  held_.Give(pin->second.space->held, std::exchange(pin->second.bytes, 0));
  const PageHandle handle = Find(keyspace, key);
  if (handle == kNoPage || !pages_[handle].pinned) ErasePin(pin);
}

void PageTable::ForgetPin(Page& page) {
  if (!page.pinned) return;
  page.pinned = false;
  if (page.holds == 0) held_.Give(page.space->held, page.slots_bytes);
}

void PageTable::LeavePin(Page& page) {
  if (!page.pinned) return;
  ForgetPin(page);
  const auto pin = pins_.find({page.keyspace, page.key});
  if (pin != pins_.end() && pin->second.bytes == 0) ErasePin(pin);
}

size_t PageTable::ExpirePins(TimePoint now, size_t count) {
  size_t ended = 0;
  for (; ended < count && !pin_ends_.empty() && pin_ends_.begin()->first <= now; ++ended) {
    const PageName name = pin_ends_.begin()->second;
    const PageHandle handle = Find(name.first, name.second);
    if (handle != kNoPage) ForgetPin(pages_[handle]);
    ErasePin(pins_.find(name));
  }
  return ended;
}

void PageTable::ErasePin(Pins::iterator pin) {
  held_.Give(pin->second.space->held, pin->second.bytes);
  pin_ends_.erase({pin->second.until, pin->first});
  pins_.erase(pin);
}

}  // namespace crumb::storage
