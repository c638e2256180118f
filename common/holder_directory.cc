// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/holder_directory.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/placement.h"

namespace crumb {
namespace {

bool Contains(const TileRange& outer, const TileRange& inner) {
  return outer.layers.Contains(inner.layers) && outer.heads.Contains(inner.heads);
}

bool Touch(IndexRange a, IndexRange b) { return a.begin <= b.end && b.begin <= a.end; }

IndexRange Hull(IndexRange a, IndexRange b) {
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

// Returns true if the union of `ranges` has every tile of `wanted`. `wanted` without the first
// range is at most four rectangles, each of which the other ranges must cover.
bool Covers(std::span<const TileRange> ranges, const TileRange& wanted) {
  if (wanted.layers.size() <= 0 || wanted.heads.size() <= 0) return true;
  if (ranges.empty()) return false;
  const TileRange& first = ranges.front();
  const auto rest = ranges.subspan(1);
  const TileRange common = Intersect(first, wanted);
  if (common.layers.size() <= 0 || common.heads.size() <= 0) return Covers(rest, wanted);
  return Covers(rest, {{wanted.layers.begin, common.layers.begin}, wanted.heads}) &&
         Covers(rest, {{common.layers.end, wanted.layers.end}, wanted.heads}) &&
         Covers(rest, {common.layers, {wanted.heads.begin, common.heads.begin}}) &&
         Covers(rest, {common.layers, {common.heads.end, wanted.heads.end}});
}

// Adds a range and joins those that make one rectangle together.
template <typename Ranges>
void AddRange(Ranges& ranges, TileRange added, size_t ranges_max) {
  for (bool joined = true; joined;) {
    joined = false;
    for (auto each = ranges.begin(); each != ranges.end(); ++each) {
      if (Contains(*each, added)) return;
      const bool in_line = (each->layers == added.layers && Touch(each->heads, added.heads)) ||
                           (each->heads == added.heads && Touch(each->layers, added.layers));
      if (!in_line && !Contains(added, *each)) continue;
      added = {Hull(each->layers, added.layers), Hull(each->heads, added.heads)};
      ranges.erase(each);
      joined = true;
      break;
    }
  }
  if (ranges.size() == ranges_max) ranges.erase(ranges.begin());
  ranges.push_back(added);
}

}  // namespace

HolderDirectory::Slot HolderDirectory::SlotOf(const std::string& node) {
  const auto [found, is_new] = slots_.try_emplace(node, last_slot_ + 1);
  if (is_new) nodes_[++last_slot_].id = node;
  return found->second;
}

void HolderDirectory::Note(const Offer& offer) {
  for (size_t i = 0; i < offer.keys.size(); ++i) {
    MutexLock lock(&mutex_);
    NoteLocked(offer, i);
  }
}

void HolderDirectory::NoteLocked(const Offer& offer, size_t index) {
  const Slot slot = SlotOf(offer.node);
  nodes_[slot].session = offer.session;
  const Name name = {offer.keyspace, offer.keys[index]};
  auto found = entries_.find(name);
  if (found == entries_.end()) {
    if (pages_max_ == 0) return;
    if (entries_.size() >= pages_max_) EvictOne();
    found = entries_.try_emplace(name).first;
    Owner& owner = owners_[slot];
    Group& group = owner.groups[offer.tenant];
    group.slot = slot;
    group.tenant = offer.tenant;
    group.order.push_front(&found->first);
    ++owner.pages;
    found->second.group = &group;
    found->second.place = group.order.begin();
    found->second.generation = offer.generation;
  }
  Entry& entry = found->second;
  if (entry.generation > offer.generation) return;
  if (entry.generation < offer.generation) {
    entry.holders.clear();
    entry.own_referrals = 0;
    entry.generation = offer.generation;
  }
  Touch(entry);
  auto holder = std::find_if(entry.holders.begin(), entry.holders.end(),
                             [&](const Holder& each) { return each.slot == slot; });
  if (holder == entry.holders.end()) {
    if (entry.holders.size() == kHoldersMax) {
      // A node that is gone, else the one that has served most.
      entry.holders.erase(std::max_element(
          entry.holders.begin(), entry.holders.end(), [&](const Holder& a, const Holder& b) {
            const auto rank = [&](const Holder& each) {
              return std::pair(!nodes_.contains(each.slot), each.referrals);
            };
            return rank(a) < rank(b);
          }));
    }
    entry.holders.push_back({slot, 0, 0, {}});
    holder = std::prev(entry.holders.end());
  }
  holder->tile_bytes = offer.tile_bytes[index];
  AddRange(holder->ranges, offer.range, kRangesMax);
}

HolderDirectory::Entry* HolderDirectory::FindEntry(const KeyspaceId& keyspace, uint64_t generation,
                                                   const PageKey& key) {
  const auto found = entries_.find(Name{keyspace, key});
  if (found == entries_.end() || found->second.generation != generation) return nullptr;
  return &found->second;
}

std::vector<HolderDirectory::Holder*> HolderDirectory::HoldersOf(
    Entry& entry, const std::optional<Slot>& requester, const TileRange& range) {
  std::vector<Holder*> holders;
  for (Holder& holder : entry.holders) {
    if (requester == holder.slot || !nodes_.contains(holder.slot)) continue;
    if (Covers(holder.ranges, range)) holders.push_back(&holder);
  }
  const auto rank = [&](const Holder* holder) {
    return std::tuple(holder->referrals, nodes_.find(holder->slot)->second.referrals, holder->slot);
  };
  std::sort(holders.begin(), holders.end(),
            [&](const Holder* a, const Holder* b) { return rank(a) < rank(b); });
  return holders;
}

bool HolderDirectory::Knows(const Query& query) const {
  const size_t pages = std::min(query.keys.size(), kRunPages);
  MutexLock lock(&mutex_);
  if (entries_.empty()) return false;
  return std::any_of(query.keys.begin(), query.keys.begin() + static_cast<std::ptrdiff_t>(pages),
                     [&](const PageKey& key) {
                       return entries_.contains(Name{query.keyspace, key});
                     });
}

std::optional<HolderDirectory::Referral> HolderDirectory::Refer(const Query& query) {
  MutexLock lock(&mutex_);
  std::optional<Slot> requester;
  if (const auto known = slots_.find(query.requester); known != slots_.end())
    requester = known->second;
  for (size_t pages = std::min(query.keys.size(), kRunPages); pages > 0; --pages) {
    if (pages < query.own_pages) break;
    Entry* const entry = FindEntry(query.keyspace, query.generation, query.keys[pages - 1]);
    if (entry == nullptr) continue;
    const std::vector<Holder*> holders = HoldersOf(*entry, requester, query.range);
    if (holders.empty()) continue;
    const Holder& best = *holders.front();
    if (pages == query.own_pages &&
        std::pair(entry->own_referrals, own_referrals_) <=
            std::pair(best.referrals, nodes_.find(best.slot)->second.referrals)) {
      break;
    }
    Referral referral;
    referral.pages = pages;
    for (const Holder* holder : holders) {
      if (referral.nodes.size() == kReferralNodesMax) break;
      referral.nodes.push_back(nodes_[holder->slot].id);
    }
    CountReferral(query, pages, holders.front()->slot);
    return referral;
  }
  CountReferral(query, std::min(query.own_pages, kRunPages), std::nullopt);
  return std::nullopt;
}

void HolderDirectory::CountReferral(const Query& query, size_t pages,
                                    const std::optional<Slot>& chosen) {
  if (!query.counted) return;
  for (size_t page = 0; page < std::min(pages, query.keys.size()); ++page) {
    Entry* const entry = FindEntry(query.keyspace, query.generation, query.keys[page]);
    if (entry == nullptr) continue;
    Touch(*entry);
    if (!chosen) ++entry->own_referrals;
    for (Holder& holder : entry->holders) {
      if (chosen == holder.slot) ++holder.referrals;
    }
  }
  (chosen ? nodes_[*chosen].referrals : own_referrals_) += pages;
}

std::vector<HolderDirectory::Part> HolderDirectory::PartsOf(const KeyspaceId& keyspace,
                                                            uint64_t generation,
                                                            const PageKey& key) {
  MutexLock lock(&mutex_);
  const Entry* const entry = FindEntry(keyspace, generation, key);
  if (entry == nullptr) return {};
  std::vector<const Holder*> alive;
  for (const Holder& holder : entry->holders) {
    if (nodes_.contains(holder.slot)) alive.push_back(&holder);
  }
  const auto has_all = [&](const Holder* one) {
    return std::all_of(alive.begin(), alive.end(), [&](const Holder* other) {
      return std::all_of(other->ranges.begin(), other->ranges.end(),
                         [&](const TileRange& range) { return Covers(one->ranges, range); });
    });
  };
  if (std::any_of(alive.begin(), alive.end(), has_all)) return {};
  std::vector<Part> parts;
  for (const Holder* holder : alive) {
    const Node& node = nodes_[holder->slot];
    for (const TileRange& range : holder->ranges) {
      parts.push_back({node.id, node.session, range, holder->tile_bytes});
    }
  }
  return parts;
}

void HolderDirectory::Forget(const std::string& node, const KeyspaceId& keyspace,
                             std::span<const PageKey> keys) {
  for (const PageKey& key : keys) {
    MutexLock lock(&mutex_);
    const auto slot = slots_.find(node);
    const auto found = entries_.find(Name{keyspace, key});
    if (slot == slots_.end() || found == entries_.end()) continue;
    auto& holders = found->second.holders;
    const auto gone = std::find_if(holders.begin(), holders.end(),
                                   [&](const Holder& each) { return each.slot == slot->second; });
    if (gone == holders.end()) continue;
    holders.erase(gone);
    if (holders.empty()) Erase(found->first);
  }
}

void HolderDirectory::ForgetPages(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  for (const PageKey& key : keys) {
    MutexLock lock(&mutex_);
    const auto found = entries_.find(Name{keyspace, key});
    if (found != entries_.end()) Erase(found->first);
  }
}

// Its pages stay, for other holders that they may have; EvictOne takes them first.
void HolderDirectory::ForgetNode(const std::string& node) {
  MutexLock lock(&mutex_);
  const auto found = slots_.find(node);
  if (found == slots_.end()) return;
  nodes_.erase(found->second);
  slots_.erase(found);
}

size_t HolderDirectory::pages() const {
  MutexLock lock(&mutex_);
  return entries_.size();
}

uint64_t HolderDirectory::evicted() const {
  MutexLock lock(&mutex_);
  return evicted_;
}

void HolderDirectory::Touch(Entry& entry) {
  auto& order = entry.group->order;
  order.splice(order.begin(), order, entry.place);
}

void HolderDirectory::Erase(const Name& name) {
  const auto found = entries_.find(name);
  Group& group = *found->second.group;
  group.order.erase(found->second.place);
  entries_.erase(found);
  const auto owner = owners_.find(group.slot);
  --owner->second.pages;
  if (group.order.empty()) owner->second.groups.erase(std::string(group.tenant));
  if (owner->second.groups.empty()) owners_.erase(owner);
}

void HolderDirectory::EvictOne() {
  const auto rank = [&](const auto& owner) {
    return std::pair(!nodes_.contains(owner.first), owner.second.pages);
  };
  const auto owner =
      std::max_element(owners_.begin(), owners_.end(),
                       [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  const auto& groups = owner->second.groups;
  const auto group = std::max_element(
      groups.begin(), groups.end(),
      [](const auto& a, const auto& b) { return a.second.order.size() < b.second.order.size(); });
  Erase(*group->second.order.back());
  ++evicted_;
}

}  // namespace crumb
