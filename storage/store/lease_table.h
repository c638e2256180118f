// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "storage/device/device_tier.h"
#include "storage/host/host_tier.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// The leases: references to the pages of a prefix in host memory and on devices, from Add until
// Release. A page stays where it is as long as a lease refers to it, whatever eviction or Delete
// do.
//
//         Add              Release, if no Read is under way
//   none -----> granted ----------------------------------> ended: its references are given back
//                  |                                          ^
//                  |  Release, if Reads are under way         |  the last of these Reads returns
//                  '---------------> released ----------------'
//
// A released lease is not found any more. The lock covers the table alone: references are taken
// before Add and given back after it is let go, because the tiers have locks of their own.
// Thread-safe.
class LeaseTable {
 public:
  // The pages of a prefix, each referred to: page i is on devices, at device[i], or in host memory,
  // at host[k] with host_index[k] == i. Without pages on devices, `device` and `host_index` are
  // empty and host[i] is page i.
  struct Prefix {
    std::vector<PageHandle> host;
    std::vector<uint32_t> host_index;
    std::vector<DeviceTier::PlacesOf> device;
    size_t host_fragments = 0;

    size_t pages() const { return device.empty() ? host.size() : device.size(); }
  };

  // The tiers outlive this.
  LeaseTable(HostTier& host, DeviceTier& devices, const Clock& clock)
      : host_(host), devices_(devices), clock_(clock) {}

  LeaseId Add(Prefix&& prefix, TimePoint now);
  // The fragments in `range`; none: the lease has ended.
  std::optional<LeasedPages> Read(LeaseId lease, const TileRange& range) const;
  // Returns false if there is no such lease. A Read that is under way keeps the pages until it
  // returns.
  bool Release(LeaseId lease);

  void AddStats(StoreStats& stats) const;

 private:
  // Gives its references back in its destructor, which must not run under the lock.
  struct Lease {
    Lease(const LeaseTable& leases, Prefix&& leased_prefix, TimePoint now)
        : table(leases), prefix(std::move(leased_prefix)), since(now) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    const LeaseTable& table;
    const Prefix prefix;
    const TimePoint since;
    mutable uint32_t readers = 0;  // Reads that are under way; guarded by mutex_
  };
  // The oldest first: leases are numbered in the order in which they are granted.
  using Leases = std::map<LeaseId, Lease>;

  // Ends a Read. Returns the lease if it was released meanwhile and this was its last reader.
  Leases::node_type EndRead(LeaseId lease, const Lease& read) const;

  HostTier& host_;
  DeviceTier& devices_;
  const Clock& clock_;

  mutable Mutex mutex_;
  Leases leases_ ABSL_GUARDED_BY(mutex_);
  mutable Leases ended_ ABSL_GUARDED_BY(mutex_);  // released while they were read
  LeaseId last_lease_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t host_fragments_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb::storage
