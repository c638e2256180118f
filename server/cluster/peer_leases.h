// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Leases that other nodes hold between asking for pages and fetching them. They keep pages in host
// memory, no more: a fetch takes a lease of its own, so one that is over in the middle makes a
// miss, not a wrong byte. That is why these, and only these, end by a clock. Thread-safe.
class PeerLeases {
 public:
  // The references must outlive this.
  PeerLeases(storage::TieredStore& store, const Clock& clock, size_t leases_max, Duration lasts)
      : store_(store), clock_(clock), leases_max_(leases_max), lasts_(lasts) {}
  ~PeerLeases();

  // Takes over store leases. 0, and they are released: there are too many.
  uint64_t Add(const std::string& node, std::vector<storage::LeaseId> leases);
  // Ends a lease of `node`.
  void Release(const std::string& node, uint64_t lease);
  // Ends those whose time is up; how many.
  size_t Reap();
  size_t size() const;

 private:
  struct Entry {
    std::string node;
    std::vector<storage::LeaseId> leases;
    TimePoint until;
  };
  void ReleaseInStore(const std::vector<storage::LeaseId>& leases);

  storage::TieredStore& store_;
  const Clock& clock_;
  const size_t leases_max_;
  const Duration lasts_;
  mutable Mutex mutex_;
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
