// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/placement.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Finds the page that begins a page's run, from the position in its header and the chain of
// parents. Remembers what it found for as many pages as it may. Thread-safe.
class RunFinder {
 public:
  // `store` must outlive this.
  RunFinder(const storage::TieredStore& store, size_t pages_max)
      : store_(store), pages_max_(pages_max) {}

  // None when an ancestor that it takes is not here. Does not block.
  std::optional<PageKey> Find(const FragmentHeader& header);

 private:
  struct Place {
    PageKey run;
    uint32_t position = 0;
  };
  std::optional<Place> PlaceOf(const FragmentHeader& header);
  std::optional<Place> Known(const PageKey& key) const;
  std::optional<Place> FromPosition(const FragmentHeader& header) const;
  std::optional<Place> FromRoot(const FragmentHeader& header) const;
  void Remember(const PageKey& key, const Place& place);

  const storage::TieredStore& store_;
  const size_t pages_max_;
  mutable Mutex mutex_;
  absl::flat_hash_map<PageKey, Place> places_ ABSL_GUARDED_BY(mutex_);
  std::deque<PageKey> by_age_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
