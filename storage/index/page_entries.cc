// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/index/page_entries.h"

#include <algorithm>
#include <array>

#include "storage/bounds.h"

namespace crumb::storage {

const PageSpace* PageEntries::SpaceOf(const KeyspaceId& keyspace) const {
  const auto found = spaces_.find(keyspace);
  return found == spaces_.end() ? nullptr : found->second.get();
}

PageSpace& PageEntries::MakeSpace(const KeyspaceId& keyspace) {
  auto& space = spaces_[keyspace];
  if (space == nullptr) space = std::make_unique<PageSpace>();
  return *space;
}

PageEntries::View PageEntries::ViewOf(const KeyspaceId& keyspace) const {
  return View(SpaceOf(keyspace));
}

PageHandle PageEntries::Find(const KeyspaceId& keyspace, const PageKey& key) const {
  return ViewOf(keyspace).Find(key);
}

void PageEntries::FindEach(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                           absl::FunctionRef<bool(size_t, PageHandle)> visit) const {
  const View view = ViewOf(keyspace);
  std::array<KeyIndex::Hashed, kPrefetchAhead> ahead;  // the next keys, by index modulo its size
  const auto look_ahead = [&](size_t i) {
    if (i >= keys.size()) return;
    ahead[i % kPrefetchAhead] = KeyIndex::Hash(keys[i]);
    view.Prefetch(ahead[i % kPrefetchAhead]);
  };
  for (size_t i = 0; i < kPrefetchAhead; ++i) look_ahead(i);
  for (size_t i = 0; i < keys.size(); ++i) {
    const PageHandle found = view.Find(ahead[i % kPrefetchAhead]);
    look_ahead(i + kPrefetchAhead);
    if (!visit(i, found)) return;
  }
}

std::vector<PageHandle> PageEntries::PagesOlderThan(const KeyspaceId& keyspace, uint64_t generation,
                                                    size_t limit) const {
  std::vector<PageHandle> found;
  const PageSpace* space = SpaceOf(keyspace);
  if (space == nullptr) return found;
  space->pages.ForEach([&](PageHandle handle) {
    if (pages_[handle].generation < generation) found.push_back(handle);
    return found.size() < limit;
  });
  return found;
}

void PageEntries::ForEach(const KeyspaceId& keyspace,
                          absl::FunctionRef<void(const Page&)> visit) const {
  const PageSpace* space = SpaceOf(keyspace);
  if (space == nullptr) return;
  space->pages.ForEach([&](PageHandle handle) {
    visit(pages_[handle]);
    return true;
  });
}

void PageEntries::ForEach(absl::FunctionRef<void(PageHandle, const Page&)> visit) const {
  for (const auto& [id, space] : spaces_) {
    space->pages.ForEach([&](PageHandle handle) {
      visit(handle, pages_[handle]);
      return true;
    });
  }
}

PageHandle PageEntries::Scan(const KeyspaceId& keyspace, PageHandle from, size_t count,
                             absl::FunctionRef<void(PageHandle, const Page&)> visit) const {
  const PageSpace* space = SpaceOf(keyspace);
  if (space == nullptr) return kNoPage;
  if (from == 0 && space->pages.size() <= count) {
    space->pages.ForEach([&](PageHandle handle) {
      visit(handle, pages_[handle]);
      return true;
    });
    return kNoPage;
  }
  const size_t end = std::min(pages_.size(), from + count);
  for (size_t handle = from; handle < end; ++handle) {
    const Page& page = pages_[handle];
    if (page.resident && page.keyspace == keyspace) visit(static_cast<PageHandle>(handle), page);
  }
  return end == pages_.size() ? kNoPage : static_cast<PageHandle>(end);
}

uint64_t PageEntries::GenerationOf(const KeyspaceId& keyspace) const {
  const PageSpace* space = SpaceOf(keyspace);
  return space == nullptr ? 0 : space->generation;
}

std::vector<std::pair<KeyspaceId, uint64_t>> PageEntries::Generations() const {
  std::vector<std::pair<KeyspaceId, uint64_t>> generations;
  for (const auto& [id, space] : spaces_) {
    if (space->generation > 0) generations.emplace_back(id, space->generation);
  }
  return generations;
}

uint32_t PageEntries::PartitionOf(const KeyspaceId& keyspace) const {
  const PageSpace* space = SpaceOf(keyspace);
  return space == nullptr ? 0 : space->partition;
}

uint64_t PageEntries::BytesOf(const KeyspaceId& keyspace) const {
  const PageSpace* space = SpaceOf(keyspace);
  return space == nullptr ? 0 : space->bytes;
}

uint64_t PageEntries::PagesOf(const KeyspaceId& keyspace) const {
  const PageSpace* space = SpaceOf(keyspace);
  return space == nullptr ? 0 : space->pages.size();
}

PageHandle PageEntries::Add(PageSpace& space, const FragmentMeta& meta, TimePoint now) {
  auto handle = static_cast<PageHandle>(pages_.size());
  if (free_.empty()) {
    pages_.Append();
  } else {
    handle = free_.back();
    free_.pop_back();
  }
  Page& page = pages_[handle];
  page.partition = space.partition;
  page.space = &space;
  page.references = page.holds = 0;
  page.slots_bytes = 0;
  page.pinned = false;
  page.was_hit = page.recency_dirty = false;
  page.access = 0;
  page.pinned_until = TimePoint();
  page.keyspace = meta.keyspace;
  page.key = meta.key;
  page.parent = meta.parent;
  page.generation = meta.generation;
  page.resident = true;
  page.added = page.used = now;
  space.pages.Insert(meta.key, handle);
  ++size_;
  return handle;
}

void PageEntries::AddFragment(PageHandle handle, const Fragment& fragment) {
  Page& page = pages_[handle];
  page.fragments.push_back(fragment);
  page.space->bytes += fragment.bytes;
  ++fragments_;
}

void PageEntries::Hide(PageHandle handle) {
  Page& page = pages_[handle];
  page.space->pages.Erase(page.key);
  page.resident = false;
  --size_;
  fragments_ -= page.fragments.size();
}

void PageEntries::Recycle(PageHandle handle) {
  Page& page = pages_[handle];
  for (const Fragment& fragment : page.fragments) page.space->bytes -= fragment.bytes;
  page.fragments.clear();
  free_.push_back(handle);
}

}  // namespace crumb::storage
