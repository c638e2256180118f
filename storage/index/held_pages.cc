// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/held_pages.h"

#include <utility>

namespace crumb::storage {

void HeldPages::SetTenant(const KeyspaceId& keyspace, const std::string& tenant) {
  if (held_.bounded()) held_.SetTenant(pages_.MakeSpace(keyspace).held, tenant);
}

void HeldPages::ForgetTenant(const KeyspaceId& keyspace) {
  const PageSpace* space = pages_.SpaceOf(keyspace);
  if (space == nullptr || space->partition != 0 || space->generation != 0) return;
  if (space->bytes > 0 || space->held.bytes > 0) return;
  if (space->pages.size() > 0 || space->vacant.size() > 0) return;
  const auto pin = pins_.lower_bound({keyspace, PageKey()});
  if (pin != pins_.end() && pin->first.first == keyspace) return;
  pages_.EraseSpace(keyspace);
}

bool HeldPages::MayInsert(const FragmentMeta& meta, const Slot& slot, Below below) const {
  const PageSpace* space = pages_.SpaceOf(meta.keyspace);
  if (!held_.bounded() || space == nullptr) return true;
  const PageHandle handle = pages_.Find(meta.keyspace, meta.key);
  const bool joins = handle != kNoPage && pages_[handle].generation == meta.generation;
  uint64_t added = joins && IsHeld(pages_[handle]) ? slot.bytes : 0;
  if (GrowsBelow(meta, joins ? &pages_[handle] : nullptr, below)) added += slot.bytes;
  return held_.Fits(space->held, added);
}

bool HeldPages::GrowsBelow(const FragmentMeta& meta, const Page* page, Below below) const {
  if (pins_.empty() || below == Below::kStored || (page != nullptr && page->pinned)) return false;
  return pins_.contains({meta.keyspace, meta.key});
}

void HeldPages::NoteInserted(Page& page, const FragmentMeta& meta, const Slot& slot, Below below) {
  if (GrowsBelow(meta, &page, below)) {
    pins_.at({meta.keyspace, meta.key}).bytes += slot.bytes;
    held_.Add(page.space->held, slot.bytes);
  }
  page.slots_bytes += slot.bytes;
  if (IsHeld(page)) held_.Add(page.space->held, slot.bytes);
}

void HeldPages::NoteMoved(Page& page, const Slot& from, const Slot& to) {
  page.slots_bytes += to.bytes;
  page.slots_bytes -= from.bytes;
  if (!IsHeld(page)) return;
  held_.Add(page.space->held, to.bytes);
  held_.Give(page.space->held, from.bytes);
}

bool HeldPages::Pin(const KeyspaceId& keyspace, const PageKey& key, uint64_t below_bytes,
                    TimePoint until) {
  const PageHandle handle = pages_.Find(keyspace, key);
  Page* const page = handle == kNoPage ? nullptr : &pages_[handle];
  if (held_.bounded()) {
    PageSpace& space = pages_.MakeSpace(keyspace);
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

void HeldPages::Unpin(const KeyspaceId& keyspace, const PageKey& key) {
  const PageHandle handle = pages_.Find(keyspace, key);
  if (handle != kNoPage) {
    pages_[handle].pinned_until = TimePoint::min();
    ForgetPin(pages_[handle]);
  }
  const auto pin = pins_.find({keyspace, key});
  if (pin != pins_.end()) ErasePin(pin);
}

void HeldPages::ForgetBelow(const KeyspaceId& keyspace, const PageKey& key) {
  if (pins_.empty()) return;
  const auto pin = pins_.find({keyspace, key});
  if (pin == pins_.end()) return;
  held_.Give(pin->second.space->held, std::exchange(pin->second.bytes, 0));
  const PageHandle handle = pages_.Find(keyspace, key);
  if (handle == kNoPage || !pages_[handle].pinned) ErasePin(pin);
}

void HeldPages::ForgetPin(Page& page) {
  if (!page.pinned) return;
  page.pinned = false;
  if (page.holds == 0) held_.Give(page.space->held, page.slots_bytes);
}

void HeldPages::LeavePin(Page& page) {
  if (!page.pinned) return;
  ForgetPin(page);
  const auto pin = pins_.find({page.keyspace, page.key});
  if (pin != pins_.end() && pin->second.bytes == 0) ErasePin(pin);
}

size_t HeldPages::ExpirePins(TimePoint now, size_t count) {
  size_t ended = 0;
  for (; ended < count && !pin_ends_.empty() && pin_ends_.begin()->first <= now; ++ended) {
    const PageName name = pin_ends_.begin()->second;
    const PageHandle handle = pages_.Find(name.first, name.second);
    if (handle != kNoPage) ForgetPin(pages_[handle]);
    ErasePin(pins_.find(name));
  }
  return ended;
}

void HeldPages::ErasePin(Pins::iterator pin) {
  held_.Give(pin->second.space->held, pin->second.bytes);
  pin_ends_.erase({pin->second.until, pin->first});
  pins_.erase(pin);
}

}  // namespace crumb::storage
