// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "server/device/pool_options.h"

namespace crumb::server {

// Resources that device pools take: pools, descriptors (a handle or a roster each), and slots up to
// the last handle of each pool. Counted for each tenant and in total, against PoolOptions'
// pools_max, descriptors_max and slots_max; one tenant gets tenant_percent of each. Sessions
// without a tenant have no part of their own: either there are no tenants, or the session is an
// administrator's. Not thread-safe. DevicePools has the only one and calls it under its lock.
class PoolBudget {
 public:
  // A number of each resource. Check ignores those of which nothing more is wanted.
  struct Amount {
    uint64_t pools = 0;
    uint64_t descriptors = 0;
    uint64_t slots = 0;

    Amount& operator+=(const Amount& other) {
      pools += other.pools;
      descriptors += other.descriptors;
      slots += other.slots;
      return *this;
    }
    Amount& operator-=(const Amount& other) {
      pools -= other.pools;
      descriptors -= other.descriptors;
      slots -= other.slots;
      return *this;
    }
  };
  // The bound that a request exceeds: that of all pools, or that of its tenant's.
  enum class Exceeded { kNone, kTotal, kTenant };
  enum class Resource { kPools, kDescriptors, kSlots };
  struct Verdict {
    Exceeded exceeded = Exceeded::kNone;
    Resource resource = Resource::kPools;  // the first that is exceeded
  };

  // Reads the process's limit of open files if options.descriptors_max is 0.
  explicit PoolBudget(const PoolOptions& options);

  // The amounts to which Check adds the request. kHeld: all that is held, pools that are ending
  // included; kOnceEnded: the rest, once these have ended.
  enum class Beside { kHeld, kOnceEnded };
  // Returns whether the tenant may take `more`, and else the bound that is exceeded, the tenant's
  // own first. Takes nothing.
  Verdict Check(const std::string& tenant, const Amount& more, Beside beside = Beside::kHeld) const;
  // Takes an amount without a check.
  void Take(const std::string& tenant, const Amount& amount);
  // An amount is held until its descriptors are closed and its memory is free: BeginEnd says that
  // this has begun, GiveBack that it is done. REQUIRES: the tenant has taken that much.
  void BeginEnd(const std::string& tenant, const Amount& amount);
  // REQUIRES: BeginEnd with as much.
  void GiveBack(const std::string& tenant, const Amount& amount);

  // Returns the bounds of all tenants together, and the amount that they hold.
  const Amount& max() const { return max_; }
  const Amount& total() const { return total_.held; }

 private:
  struct Used {
    Amount held;    // all amounts, including those that are ending
    Amount ending;  // amounts that are ending
  };

  Amount max_;
  Amount tenant_max_;
  Used total_;
  std::map<std::string, Used> tenants_;
};

}  // namespace crumb::server
