// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/eviction_order.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace crumb::storage {
namespace {

uint64_t FingerprintOf(const PageKey& key) {
  uint64_t fingerprint;
  std::memcpy(&fingerprint, key.bytes.data(), sizeof(fingerprint));
  return fingerprint;
}

}  // namespace

EvictionOrder::EvictionOrder(std::unique_ptr<EvictionPolicy> policy, PageEntries& pages)
    : pages_(pages) {
  AddPartition(std::move(policy));
}

uint32_t EvictionOrder::AddPartition(std::unique_ptr<EvictionPolicy> policy) {
  partitions_.push_back({std::move(policy), {}});
  return partitions() - 1;
}

void EvictionOrder::Add(PageHandle handle) {
  Page& page = pages_[handle];
  const ForestHandle place = TakePlace(page);
  const ForestHandle parent = ParentPlace(page, place);
  const PageHandle parent_page = parent == kNoForestNode ? kNoPage : places_[parent].page;
  TenantPartition& partition = partitions_[page.partition];
  page.item = partition.policy->Insert(
      {.fingerprint = FingerprintOf(page.key),
       .parent = parent_page == kNoPage ? kNoItem : pages_[parent_page].item,
       .has_children = places_[place].first_child != kNoForestNode});
  partition.page_of_item.GrowTo(page.item + size_t{1});
  partition.page_of_item[page.item] = handle;
  page.place = place;
  places_[place].page = handle;
  if (parent != kNoForestNode) LinkPlace(place, parent);
}

void EvictionOrder::Remove(PageHandle handle, Removal removal) {
  Page& page = pages_[handle];
  partitions_[page.partition].policy->Remove(page.item, removal);
  LeavePlace(page);
  page.item = kNoItem;
  page.place = kNoForestNode;
}

void EvictionOrder::Hit(PageHandle handle) {
  const Page& page = pages_[handle];
  if (page.resident) partitions_[page.partition].policy->Hit(page.item);
}

std::optional<PageHandle> EvictionOrder::Victim(TimePoint now,
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

ForestHandle EvictionOrder::NewPlace() {
  const ForestHandle place = forest_.Add();
  places_.GrowTo(place + size_t{1});
  places_[place] = {};
  return place;
}

ForestHandle EvictionOrder::TakePlace(const Page& page) {
  const ForestHandle vacant = page.space->vacant.Find(page.key);
  if (vacant == KeyIndex::kNone) return NewPlace();
  page.space->vacant.Erase(page.key);
  return vacant;
}

ForestHandle EvictionOrder::ParentPlace(const Page& page, ForestHandle place) {
  if (page.parent == PageKey{} || page.parent == page.key) return kNoForestNode;
  PageSpace& space = *page.space;
  const PageHandle there = space.pages.Find(page.parent);
  ForestHandle parent =
      there == kNoPage ? space.vacant.Find(page.parent) : ForestHandle{pages_[there].place};
  if (parent == kNoForestNode) {
    parent = NewPlace();
    space.vacant.Insert(page.parent, parent);
    return parent;
  }
  // Only a page that has children already can be above its own parent.
  const bool has_children = places_[place].first_child != kNoForestNode;
  return has_children && forest_.SameTree(place, parent) ? kNoForestNode : parent;
}

void EvictionOrder::LinkPlace(ForestHandle place, ForestHandle parent) {
  forest_.Link(place, parent);
  const ForestHandle sibling = places_[parent].first_child;
  places_[place].parent = parent;
  places_[place].next_sibling = sibling;
  places_[parent].first_child = place;
  if (sibling == kNoForestNode) {
    NoteChildren(parent, true);
  } else {
    places_[sibling].previous_sibling = place;
  }
}

void EvictionOrder::NoteChildren(ForestHandle place, bool has_children) {
  const PageHandle handle = places_[place].page;
  if (handle == kNoPage) return;
  const Page& page = pages_[handle];
  partitions_[page.partition].policy->SetHasChildren(page.item, has_children);
}

void EvictionOrder::UnlinkPlace(ForestHandle place) {
  Place& child = places_[place];
  const ForestHandle parent = child.parent;
  if (parent == kNoForestNode) return;
  if (child.first_child != kNoForestNode) forest_.Cut(place);
  if (child.next_sibling != kNoForestNode) {
    places_[child.next_sibling].previous_sibling = child.previous_sibling;
  }
  (child.previous_sibling == kNoForestNode ? places_[parent].first_child
                                           : places_[child.previous_sibling].next_sibling) =
      child.next_sibling;
  child.parent = child.next_sibling = child.previous_sibling = kNoForestNode;
}

void EvictionOrder::LeavePlace(const Page& page) {
  PageSpace& space = *page.space;
  const ForestHandle place = page.place;
  const ForestHandle parent = places_[place].parent;
  UnlinkPlace(place);
  places_[place].page = kNoPage;
  if (places_[place].first_child != kNoForestNode) {
    space.vacant.Insert(page.key, place);
  } else {
    forest_.Remove(place);
  }
  if (parent == kNoForestNode || places_[parent].first_child != kNoForestNode) return;
  if (places_[parent].page != kNoPage) return NoteChildren(parent, false);
  space.vacant.Erase(page.parent);
  forest_.Remove(parent);
}

std::optional<PageHandle> EvictionOrder::FreeAncestor(absl::FunctionRef<bool(const Page&)> is_free,
                                                      PageHandle& from, size_t& steps) const {
  while (steps > 0) {
    --steps;
    const ForestHandle parent = places_[pages_[from].place].parent;
    from = parent == kNoForestNode ? kNoPage : places_[parent].page;
    if (from == kNoPage) return std::nullopt;
    if (is_free(pages_[from])) return from;
  }
  return std::nullopt;
}

std::optional<PageHandle> EvictionOrder::InnerVictim(TimePoint now,
                                                     absl::FunctionRef<bool(const Page&)> may_go,
                                                     uint32_t partition, PageHandle& from,
                                                     size_t& steps) {
  const auto is_free = [&](const Page& page) {
    return page.references == 0 && page.pinned_until <= now && may_go(page);
  };
  std::optional<PageHandle> found;
  // The page may have left, and another one may have its handle, since the last call.
  if (from != kNoPage && (!pages_[from].resident || pages_[from].partition != partition)) {
    from = kNoPage;
  }
  if (from != kNoPage) found = FreeAncestor(is_free, from, steps);
  if (found || steps == 0) return found;
  const ChunkedVector<PageHandle>& page_of_item = partitions_[partition].page_of_item;
  size_t leaves = steps;
  partitions_[partition].policy->FindVictim(
      [&](ItemHandle leaf) {
        from = page_of_item[leaf];
        found = FreeAncestor(is_free, from, steps);
        return !found && steps > 0;  // the search for leaves goes on
      },
      leaves);
  steps = std::min(steps, leaves);
  return found;
}

std::optional<PageHandle> EvictionOrder::ParentLeftBy(
    PageHandle page, absl::FunctionRef<bool(PageHandle)> leaving) const {
  const ForestHandle place = pages_[page].place;
  if (place == kNoForestNode || places_[place].parent == kNoForestNode) return std::nullopt;
  const Place& parent = places_[places_[place].parent];
  if (parent.page == kNoPage) return std::nullopt;
  size_t seen = 0;
  for (ForestHandle child = parent.first_child; child != kNoForestNode;
       child = places_[child].next_sibling) {
    if (++seen > kSiblingsMax || !leaving(places_[child].page)) return std::nullopt;
  }
  return parent.page;
}

}  // namespace crumb::storage
