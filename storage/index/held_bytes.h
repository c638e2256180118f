// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/tenant_budget.h"

namespace crumb::storage {

// The bytes of host memory that each tenant keeps from being reused, by leases, reads and pins.
// Without a bound one tenant could lease or pin all of host memory, and every commit of the others
// would be refused. A tenant may keep at most a percentage of the bytes that the other tenants do
// not keep; TenantBudget has the rule. Not thread-safe: the tier's lock covers it.
class HeldBytes {
 public:
  // The bytes that one keyspace keeps, which count for its tenant.
  struct Account {
    uint64_t bytes = 0;
    uint32_t tenant = 0;  // index in tenants_
  };

  // Without this call nothing is counted or refused. REQUIRES: no account has bytes;
  // part_max_percent is from 1 to 100.
  void SetBound(uint64_t total, int64_t part_max_percent) {
    total_ = total;
    part_max_percent_ = part_max_percent;
  }
  bool bounded() const { return total_ > 0; }

  // Whether the tenant may keep `bytes` more. Keeping 0 more is always allowed, also for a tenant
  // that keeps more than its part since others came.
  bool Fits(const Account& account, uint64_t bytes) const {
    if (bytes == 0 || !bounded()) return true;
    const uint64_t own = tenants_[account.tenant];
    return own + bytes <= TenantPart(total_, used_ - own, part_max_percent_);
  }
  void Add(Account& account, uint64_t bytes) {
    if (!bounded()) return;
    account.bytes += bytes;
    tenants_[account.tenant] += bytes;
    used_ += bytes;
  }
  void Give(Account& account, uint64_t bytes) {
    if (!bounded()) return;
    account.bytes -= bytes;
    tenants_[account.tenant] -= bytes;
    used_ -= bytes;
  }
  // The account's bytes count for this tenant from now on. "": no tenant.
  void SetTenant(Account& account, const std::string& tenant) {
    const auto [found, added] =
        numbers_.try_emplace(tenant, static_cast<uint32_t>(tenants_.size()));
    if (added) tenants_.push_back(0);
    tenants_[account.tenant] -= account.bytes;
    account.tenant = found->second;
    tenants_[account.tenant] += account.bytes;
  }

  uint64_t used() const { return used_; }

 private:
  uint64_t total_ = 0;  // 0: no bound
  int64_t part_max_percent_ = 100;
  uint64_t used_ = 0;
  std::vector<uint64_t> tenants_ = {0};  // bytes, by number
  // The tenants that ever had a keyspace, which are few.
  absl::flat_hash_map<std::string, uint32_t> numbers_ = {{"", 0}};
};

}  // namespace crumb::storage
