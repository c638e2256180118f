// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "storage/index/page.h"
#include "storage/policy/chunked_vector.h"

namespace crumb::storage {

// The pages of one tier by handle, and by key within their keyspaces. A PageTable owns it and
// changes it; tiers search it through PageTable::pages(), which is constant. It knows nothing of
// the order in which pages are evicted, of pins or of slots.
//
// A handle is in one of these states:
//
//   state     meaning                                   next state, and the call that leads to it
//   free      there is no page                          resident: Add
//   resident  Find returns the page                     removed: Hide
//   removed   its key is absent or of another page;     free: Recycle
//             references to the page keep its fragments
//
// Every call costs O(1) for each key or page that it is given or returns, except for ForEach and
// PagesOlderThan, which walk. Not thread-safe: the tier's lock covers it.
class PageEntries {
 public:
  Page& operator[](PageHandle page) { return pages_[page]; }
  const Page& operator[](PageHandle page) const { return pages_[page]; }

  // Returns the resident page of that key, or kNoPage.
  PageHandle Find(const KeyspaceId& keyspace, const PageKey& key) const;
  // Finds keys in order until `visit`, called with index and handle or kNoPage, returns false.
  // `visit` may refer to pages, but must not add or remove any.
  void FindEach(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                absl::FunctionRef<bool(size_t, PageHandle)> visit) const;
  // Looks up many pages of one keyspace; valid until pages are added or removed.
  class View;
  View ViewOf(const KeyspaceId& keyspace) const;

  // Up to `limit` resident pages of a keyspace with a generation below `generation`.
  std::vector<PageHandle> PagesOlderThan(const KeyspaceId& keyspace, uint64_t generation,
                                         size_t limit = SIZE_MAX) const;
  // Visits the resident pages, of one keyspace or of all. `visit` must not add or remove any.
  void ForEach(const KeyspaceId& keyspace, absl::FunctionRef<void(const Page&)> visit) const;
  void ForEach(absl::FunctionRef<void(PageHandle, const Page&)> visit) const;
  // Visits pages of a keyspace in pieces between which the tier may release its lock: looks at up
  // to `count` pages from `from` on, 0 at first, and returns where the next piece begins, kNoPage
  // behind the last. Sees every page once that is there from the first piece to the last. `visit`
  // must not add or remove pages.
  PageHandle Scan(const KeyspaceId& keyspace, PageHandle from, size_t count,
                  absl::FunctionRef<void(PageHandle, const Page&)> visit) const;
  // Handles that were ever used: each page has a lower one as long as it is here.
  PageHandle handles_end() const { return static_cast<PageHandle>(pages_.size()); }

  // Returns the generation that PageTable::RaiseGeneration set, 0 if it did not.
  uint64_t GenerationOf(const KeyspaceId& keyspace) const;
  std::vector<std::pair<KeyspaceId, uint64_t>> Generations() const;
  // Returns the tenant partition that pages of the keyspace lie in.
  uint32_t PartitionOf(const KeyspaceId& keyspace) const;
  // Returns the bytes of fragments, tiles and headers, those of removed pages included.
  uint64_t BytesOf(const KeyspaceId& keyspace) const;
  // Resident pages of the keyspace.
  uint64_t PagesOf(const KeyspaceId& keyspace) const;
  // Resident pages of all keyspaces.
  uint64_t size() const { return size_; }
  // Returns how many fragments the resident pages have together.
  uint64_t fragments() const { return fragments_; }

  // Returns null for a keyspace without state, which MakeSpace adds and EraseSpace removes.
  const PageSpace* SpaceOf(const KeyspaceId& keyspace) const;
  PageSpace& MakeSpace(const KeyspaceId& keyspace);
  // REQUIRES: no page, removed ones included, is of the keyspace.
  void EraseSpace(const KeyspaceId& keyspace) { spaces_.erase(keyspace); }

  // Adds a page without fragments. REQUIRES: the key is absent.
  PageHandle Add(PageSpace& space, const FragmentMeta& meta, TimePoint now);
  void AddFragment(PageHandle page, const Fragment& fragment);
  // The page is not found any more. REQUIRES: it is resident.
  void Hide(PageHandle page);
  // Forgets the page's fragments, whose slots the caller has freed, and frees its handle.
  // REQUIRES: Hide was called for it.
  void Recycle(PageHandle page);

 private:
  absl::flat_hash_map<KeyspaceId, std::unique_ptr<PageSpace>> spaces_;
  ChunkedVector<Page> pages_;
  std::vector<PageHandle> free_;
  uint64_t size_ = 0;
  uint64_t fragments_ = 0;
};

class PageEntries::View {
 public:
  // Whether the keyspace has no resident page.
  bool empty() const { return space_ == nullptr || space_->pages.size() == 0; }
  PageHandle Find(const PageKey& key) const { return Find(KeyIndex::Hash(key)); }
  PageHandle Find(const KeyIndex::Hashed& key) const {
    static_assert(kNoPage == KeyIndex::kNone);
    return space_ == nullptr ? kNoPage : space_->pages.Find(key);
  }
  // Prefetches the bucket that Find will read.
  void Prefetch(const KeyIndex::Hashed& key) const {
    if (space_ != nullptr) space_->pages.Prefetch(key);
  }
  void Prefetch(const PageKey& key) const { Prefetch(KeyIndex::Hash(key)); }

 private:
  friend class PageEntries;
  explicit View(const PageSpace* space) : space_(space) {}
  const PageSpace* space_;
};

}  // namespace crumb::storage
