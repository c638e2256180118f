// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/placement.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Finds the first page of a page's run, from the position in the page's header and the chain of
// parents. Caches the results for a bounded number of pages.
//
// Writers choose the parents, so these may form a ring or an endless chain. A step is one read of a
// page's parent in the store. A header with a position takes at most 31 steps. Without a position,
// the walk goes towards the root: it stops at the first page whose place is cached, caches the
// place of every page on its way, and takes its steps from a common credit, which each page that is
// looked up raises by kRunPages up to kWalkStepsMax. So n pages take at most n * kRunPages +
// kWalkStepsMax steps. A ring has no root; its pages have no run. Thread-safe.
class RunFinder {
 public:
  // Steps of one walk to the root: a context of 524,288 tokens.
  static constexpr uint32_t kWalkStepsMax = 1 << 13;

  // `store` must outlive this.
  RunFinder(const storage::TieredStore& store, size_t pages_max)
      : store_(store), pages_max_(pages_max) {}

  // Returns none if an ancestor on the way is not on this node, or is beyond the credit of steps.
  // Does not block.
  std::optional<PageKey> Find(const FragmentHeader& header);

 private:
  // A page's position in its sequence, counted from 0, and the first page of its run.
  struct Place {
    PageKey run;
    uint32_t position = 0;
  };
  std::optional<Place> PlaceOf(const FragmentHeader& header);
  // Returns the cached place of a page.
  std::optional<Place> Known(const PageKey& key) const;
  // Goes back to the run's first page, whose distance the header's position says.
  std::optional<Place> FromPosition(const FragmentHeader& header) const;
  std::optional<Place> FromRoot(const FragmentHeader& header);
  // Places the pages of `chain`, the last of which hangs on `root` (none: it is the first page of
  // its sequence), and remembers them. Returns the place of the first.
  Place PlaceChain(const std::vector<PageKey>& chain, const std::optional<Place>& root);
  // Takes a step from the credit. Returns false if there is none.
  bool TakeStep();
  // Caches a place; the oldest is forgotten beyond pages_max.
  void Remember(const PageKey& key, const Place& place);

  const storage::TieredStore& store_;
  const size_t pages_max_;
  mutable Mutex mutex_;
  uint32_t credit_ ABSL_GUARDED_BY(mutex_) = kWalkStepsMax;  // steps
  absl::flat_hash_map<PageKey, Place> places_ ABSL_GUARDED_BY(mutex_);
  std::deque<PageKey> by_age_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
