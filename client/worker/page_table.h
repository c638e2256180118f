// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "client/worker/page.h"
#include "common/mutex.h"

namespace crumb::client {

// PageTable finds the pages that live sequences of one worker hold, by key, so that sequences with
// a common prefix use the same pages. It does not own pages. A page of a newer generation replaces
// that of an older one. Pages may outlive the table. Thread-safe.
//
// It holds weak references. A page that sequences share is wrapped in a reference whose deleter
// takes the page out of the table; looking a key up and dropping the last reference may therefore
// race, and Find then returns null.
class PageTable {
 public:
  PageTable() : state_(std::make_shared<State>()) {}

  // Returns null if no live sequence holds the page; with `generation`, also if it has another one.
  std::shared_ptr<const Page> Find(const PageKey& key) const;
  std::shared_ptr<const Page> Find(const PageKey& key, uint64_t generation) const;

  // Returns a reference to the page that Insert can make findable. The page is findable until the
  // last copy of that reference is destroyed.
  std::shared_ptr<const Page> Wrap(std::shared_ptr<const Page> page);
  // Makes a complete page findable. REQUIRES: Wrap returned `wrapped`, and its key is final. The
  // first page of a key stays until one of a newer generation is inserted.
  void Insert(const std::shared_ptr<const Page>& wrapped);
  // Wraps and inserts a page.
  std::shared_ptr<const Page> Share(std::shared_ptr<const Page> page);
  // Wraps and inserts the pages of a fetched prefix in blocks of kRunPages. The pages of a block
  // are held as long as one of them is.
  std::vector<std::shared_ptr<const Page>> ShareAll(std::vector<std::shared_ptr<Page>> pages);

  // Makes the page unfindable if it is findable; another page of its key can be inserted then.
  void Remove(const Page& page);
  // Returns the keys of all findable pages.
  std::vector<PageKey> Keys() const;

  // Returns the number of findable pages.
  size_t size() const;

 private:
  struct Entry {
    std::weak_ptr<const Page> page;
    uint64_t generation = 0;
  };
  struct State {
    mutable Mutex mutex;
    absl::flat_hash_map<PageKey, Entry> pages ABSL_GUARDED_BY(mutex);

    // Removes the entry unless another page of this key has replaced it.
    void Forget(const PageKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
    // Keeps the first page of a key and generation.
    void Insert(const std::shared_ptr<const Page>& wrapped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  };
  struct Run;
  std::shared_ptr<State> state_;
};

}  // namespace crumb::client
