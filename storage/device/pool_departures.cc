// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/device/pool_departures.h"

namespace crumb::storage {

std::optional<PageHandle> PoolDepartures::ParentToLeave(PageHandle child, TimePoint now) const {
  if (child == kNoPage) return std::nullopt;
  const auto parent = table_.order().ParentLeftBy(
      child, [this](PageHandle sibling) { return leaving_.contains(sibling); });
  if (!parent) return std::nullopt;
  const Page& page = table_[*parent];
  const bool idle = page.references == 0 && page.pinned_until <= now;
  if (!idle || page.used > table_[child].used) return std::nullopt;
  return parent;
}

std::optional<PoolDepartures::Departure> PoolDepartures::Begin(PageHandle child, TimePoint now) {
  if (slots_.recovering()) return std::nullopt;
  std::optional<PageHandle> page = ParentToLeave(child, now);
  if (!page) page = table_.order().Victim(now, [](const Page&) { return true; });
  if (!page) return std::nullopt;
  table_.Ref(*page);
  leaving_[*page] = ++last_departure_;
  return Departure{*page, last_departure_};
}

void PoolDepartures::End(const Departure& departure, Departed departed, TimePoint now) {
  if (!Departing(departure)) return;
  const PageHandle page = departure.page;
  leaving_.erase(page);
  // A page that was leased meanwhile is worth keeping.
  const bool ours_alone = table_[page].references == 1;
  if (departed == Departed::kGone && ours_alone && table_[page].resident) {
    table_.Remove(page, RemovalReason::kCapacity, now);
  }
  table_.Unref(page);
}

std::vector<uint64_t> PoolDepartures::Demote(const Departure& departure, HolderId holder) {
  std::vector<uint64_t> work;
  if (!Departing(departure)) return work;
  for (const Fragment& fragment : table_[departure.page].fragments) {
    const uint64_t slot = slots_.NumberOf(fragment.slot);
    demoting_[slot] = {departure, holder};
    work.push_back(slot);
  }
  return work;
}

bool PoolDepartures::ForgetDemotion(const Departure& departure) {
  if (!Departing(departure)) return false;
  for (const Fragment& fragment : table_[departure.page].fragments) {
    demoting_.erase(slots_.NumberOf(fragment.slot));
  }
  return true;
}

std::optional<FragmentMeta> PoolDepartures::DemotingAt(HolderId holder, uint64_t slot) const {
  const auto found = demoting_.find(slot);
  if (found == demoting_.end() || found->second.by != holder) return std::nullopt;
  const Page& page = table_[found->second.departure.page];
  for (const Fragment& fragment : page.fragments) {
    if (slots_.NumberOf(fragment.slot) == slot) return page.MetaOf(fragment);
  }
  return std::nullopt;
}

bool PoolDepartures::Demoted(HolderId holder, uint64_t slot, TimePoint now) {
  const auto found = demoting_.find(slot);
  if (found == demoting_.end() || found->second.by != holder) return false;
  const Departure departure = found->second.departure;
  demoting_.erase(found);
  for (const Fragment& fragment : table_[departure.page].fragments) {
    if (demoting_.contains(slots_.NumberOf(fragment.slot))) return true;  // other copies remain
  }
  End(departure, Departed::kGone, now);
  return true;
}

size_t PoolDepartures::DropDemotions(HolderId holder, TimePoint now) {
  std::vector<uint64_t> slots;
  for (const auto& [slot, demoting] : demoting_) {
    if (demoting.by == holder) slots.push_back(slot);
  }
  for (const uint64_t slot : slots) Demoted(holder, slot, now);
  return slots.size();
}

}  // namespace crumb::storage
