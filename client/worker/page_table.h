// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "client/worker/page.h"
#include "common/mutex.h"

namespace crumb::client {

// The pages that live sequences of one worker hold, by key, so that equal prefixes share them.
// Holds no page itself. A page of a dropped generation is replaced by one of a newer generation,
// and is not found by sequences of the newer one. Pages may outlive the table. Thread-safe.
class PageTable {
 public:
  PageTable() : state_(std::make_shared<State>()) {}

  // Null when no live sequence holds the page; the second form: in this generation.
  std::shared_ptr<const Page> Find(const PageKey& key) const;
  std::shared_ptr<const Page> Find(const PageKey& key, uint64_t generation) const;

  // A page that Insert may make findable later, until the last holder of the result lets go.
  std::shared_ptr<const Page> Wrap(std::shared_ptr<const Page> page);
  // Makes a complete page findable; `wrapped` is of Wrap, its key is final. The first page of a key
  // stays until one of a newer generation comes.
  void Insert(const std::shared_ptr<const Page>& wrapped);
  // Both.
  std::shared_ptr<const Page> Share(std::shared_ptr<const Page> page);
  // Both for the pages of a fetched prefix, run by run: those of a run are held as long as one of
  // them is.
  std::vector<std::shared_ptr<const Page>> ShareAll(std::vector<std::shared_ptr<Page>> pages);

  // Makes the page findable no more, if it is; another one of its key may come.
  void Remove(const Page& page);
  // Of all pages that can be found now.
  std::vector<PageKey> Keys() const;

  size_t size() const;

 private:
  struct Entry {
    std::weak_ptr<const Page> page;
    uint64_t generation = 0;
  };
  struct State {
    mutable Mutex mutex;
    absl::flat_hash_map<PageKey, Entry> pages ABSL_GUARDED_BY(mutex);

    // Unless another page of this key has taken the place meanwhile.
    void Forget(const PageKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
    // The first page of a key and generation stays.
    void Insert(const std::shared_ptr<const Page>& wrapped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  };
  struct Run;
  std::shared_ptr<State> state_;
};

}  // namespace crumb::client
