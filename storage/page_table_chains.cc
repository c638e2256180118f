// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The part of a page table that keeps the chains of pages, and the lists of pages that the tier
// below lacks.
#include <algorithm>
#include <utility>

#include "storage/page_table.h"

namespace crumb::storage {

ForestHandle PageTable::NewPlace() {
  const ForestHandle place = forest_.Add();
  places_.GrowTo(place + size_t{1});
  places_[place] = {};
  return place;
}

ForestHandle PageTable::TakePlace(Space& space, const PageKey& key) {
  const ForestHandle vacant = space.vacant.Find(key);
  if (vacant == KeyIndex::kNone) return NewPlace();
  space.vacant.Erase(key);
  return vacant;
}

ForestHandle PageTable::ParentPlace(Space& space, const FragmentMeta& meta, ForestHandle place) {
  if (meta.parent == PageKey{} || meta.parent == meta.key) return kNoForestNode;
  const PageHandle page = space.pages.Find(meta.parent);
  ForestHandle parent =
      page == kNoPage ? space.vacant.Find(meta.parent) : ForestHandle{pages_[page].place};
  if (parent == kNoForestNode) {
    parent = NewPlace();
    space.vacant.Insert(meta.parent, parent);
    return parent;
  }
  // Only a page that has children already can be above its own parent.
  const bool has_children = places_[place].first_child != kNoForestNode;
  return has_children && forest_.SameTree(place, parent) ? kNoForestNode : parent;
}

void PageTable::LinkPlace(ForestHandle place, ForestHandle parent) {
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

void PageTable::NoteChildren(ForestHandle place, bool has_children) {
  const PageHandle handle = places_[place].page;
  if (handle == kNoPage) return;
  const Page& page = pages_[handle];
  partitions_[page.partition].policy->SetHasChildren(page.item, has_children);
}

void PageTable::UnlinkPlace(ForestHandle place) {
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

// Children keep the place, for their parent may come back.
void PageTable::LeavePlace(Space& space, const Page& page) {
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

std::optional<PageHandle> PageTable::FreeAncestor(absl::FunctionRef<bool(const Page&)> is_free,
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

std::optional<PageHandle> PageTable::InnerVictim(TimePoint now,
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

std::optional<PageHandle> PageTable::ParentLeftBy(
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
