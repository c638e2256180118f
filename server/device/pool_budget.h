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
// administrator's. Not thread-safe.
class PoolBudget {
 public:
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
  enum class Exceeded { kNone, kTotal, kTenant };
  enum class Resource { kPools, kDescriptors, kSlots };
  struct Verdict {
    Exceeded exceeded = Exceeded::kNone;
    Resource resource = Resource::kPools;  // the first that is exceeded
  };

  // Reads the process's limit of open files if options.descriptors_max is 0.
  explicit PoolBudget(const PoolOptions& options);

  // Whether the tenant may take `more`, its own part first. kHeld: beside all that is held, pools
  // that are ending included; kOnceEnded: when these have ended.
  enum class Beside { kHeld, kOnceEnded };
  Verdict Check(const std::string& tenant, const Amount& more, Beside beside = Beside::kHeld) const;
  void Take(const std::string& tenant, const Amount& amount);
  // An amount is held until its descriptors are closed and its memory is free: BeginEnd says that
  // this has begun, GiveBack that it is done. REQUIRES: the tenant has taken that much.
  void BeginEnd(const std::string& tenant, const Amount& amount);
  // REQUIRES: BeginEnd with as much.
  void GiveBack(const std::string& tenant, const Amount& amount);

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
