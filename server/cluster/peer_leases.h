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

// Leases that other nodes hold between PeerAcquire and the fetch. They only keep pages in host
// memory: a fetch takes a lease of its own, so one that is over in the middle makes a
// miss, not a wrong byte. That is why these, and only these, end by a clock. One node may have only
// a part of them, so that it cannot keep the others from theirs. Thread-safe.
class PeerLeases {
 public:
  struct Bounds {
    size_t leases_max = 4096;           // limit for all nodes together
    size_t leases_per_node_max = 1024;  // limit for one node
    size_t pages_per_node_max = 65'536;
  };

  // The references must outlive this.
  PeerLeases(storage::TieredStore& store, const Clock& clock, const Bounds& bounds, Duration lasts)
      : store_(store), clock_(clock), bounds_(bounds), lasts_(lasts) {}
  ~PeerLeases();

  // Takes over store leases of `pages` pages for `node` and returns the number by which the node
  // releases them. Returns 0, and releases them, if a bound is reached.
  uint64_t Add(const std::string& node, std::vector<storage::LeaseId> leases, size_t pages);
  // Ends a lease of `node`. Ignores numbers that are not the node's.
  void Release(const std::string& node, uint64_t lease);
  // Ends the leases whose time is up and returns how many there were. The cluster calls it every
  // second.
  size_t Reap();
  // Returns the number of leases of all nodes.
  size_t size() const;

 private:
  struct Entry {
    std::string node;
    std::vector<storage::LeaseId> leases;
    size_t pages = 0;
    TimePoint until;
  };
  struct Held {
    size_t leases = 0;
    size_t pages = 0;
  };
  // Subtracts an entry from its node's part.
  void GiveBack(const Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends leases in the store. The lock is not held, because that takes time in their size.
  void ReleaseInStore(const std::vector<storage::LeaseId>& leases);

  storage::TieredStore& store_;
  const Clock& clock_;
  const Bounds bounds_;
  const Duration lasts_;
  mutable Mutex mutex_;
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Held> held_ ABSL_GUARDED_BY(mutex_);  // keyed by node
};

}  // namespace crumb::server
