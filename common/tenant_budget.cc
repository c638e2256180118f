// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/tenant_budget.h"

#include <algorithm>

namespace crumb {

TenantBudget::Taken TenantBudget::Take(const std::string& tenant, uint64_t amount) {
  if (amount == 0) return Taken::kYes;
  if (!separates_tenants()) {
    uint64_t used = used_.load();
    do {
      if (amount > total_ || used > total_ - amount) return Taken::kTotalFull;
    } while (!used_.compare_exchange_weak(used, used + amount));
    return Taken::kYes;
  }
  MutexLock lock(&mutex_);
  const uint64_t used = used_.load();
  if (amount > total_ || used > total_ - amount) return Taken::kTotalFull;
  const auto found = held_.find(tenant);
  const uint64_t held = found == held_.end() ? 0 : found->second;
  const bool first_unit = held == 0 && amount == 1;
  if (!first_unit && held + amount > TenantPart(total_, used - held, part_max_percent_)) {
    return Taken::kPartFull;
  }
  held_[tenant] += amount;
  used_.store(used + amount);
  return Taken::kYes;
}

void TenantBudget::Add(const std::string& tenant, uint64_t amount) {
  if (!separates_tenants()) {
    used_.fetch_add(amount);
    return;
  }
  MutexLock lock(&mutex_);
  held_[tenant] += amount;
  used_.fetch_add(amount);
}

void TenantBudget::Give(const std::string& tenant, uint64_t amount) {
  if (!separates_tenants()) {
    used_.fetch_sub(amount);
    return;
  }
  MutexLock lock(&mutex_);
  const auto found = held_.find(tenant);
  if (found == held_.end()) return;
  const uint64_t given = std::min(found->second, amount);
  found->second -= given;
  used_.fetch_sub(given);
  if (found->second == 0) held_.erase(found);
}

uint64_t TenantBudget::used_by(const std::string& tenant) const {
  MutexLock lock(&mutex_);
  const auto found = held_.find(tenant);
  return found == held_.end() ? 0 : found->second;
}

absl::Status TenantBudget::Error(Taken taken, const char* key) {
  if (taken == Taken::kYes) return absl::OkStatus();
  const std::string name = key;
  return absl::ResourceExhaustedError(
      taken == Taken::kTotalFull
          ? name + " is reached, try again"
          : name + ": the tenant holds its part of it (tenants.part_max_percent), try again");
}

}  // namespace crumb
