// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/device/pool_budget.h"

#include <sys/resource.h>

#include <algorithm>
#include <optional>

namespace crumb::server {
namespace {

// One descriptor in so many is left for sockets, extents, slabs and libraries.
constexpr uint64_t kReserve = 2;
// Limits above it are as good as none; keeps products with percentages far from overflow.
constexpr uint64_t kDescriptorsMax = 100'000'000;

uint64_t HalfOfOpenFiles() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = 1024;  // Linux's default limit
  return std::min<uint64_t>(limit.rlim_cur, kDescriptorsMax) / kReserve;
}

PoolBudget::Amount PartOf(const PoolBudget::Amount& max, uint64_t percent) {
  const auto part = [percent](uint64_t all) {
    return std::min(all, std::max<uint64_t>(1, all * percent / 100));
  };
  return {part(max.pools), part(max.descriptors), part(max.slots)};
}

// The first resource of which `used` and `more` together are over `max`.
std::optional<PoolBudget::Resource> Over(const PoolBudget::Amount& used,
                                         const PoolBudget::Amount& more,
                                         const PoolBudget::Amount& max) {
  const auto over = [](uint64_t taken, uint64_t wanted, uint64_t bound) {
    return wanted > 0 && (taken > bound || wanted > bound - taken);
  };
  if (over(used.pools, more.pools, max.pools)) return PoolBudget::Resource::kPools;
  if (over(used.descriptors, more.descriptors, max.descriptors)) {
    return PoolBudget::Resource::kDescriptors;
  }
  if (over(used.slots, more.slots, max.slots)) return PoolBudget::Resource::kSlots;
  return std::nullopt;
}

}  // namespace

PoolBudget::PoolBudget(const PoolOptions& options)
    : max_{static_cast<uint64_t>(options.pools_max),
           options.descriptors_max > 0 ? static_cast<uint64_t>(options.descriptors_max)
                                       : HalfOfOpenFiles(),
           static_cast<uint64_t>(options.slots_max)},
      tenant_max_(PartOf(max_, static_cast<uint64_t>(options.tenant_percent))) {}

PoolBudget::Verdict PoolBudget::Check(const std::string& tenant, const Amount& more,
                                      Beside beside) const {
  const auto counted = [beside](const Used& used) {
    Amount amount = used.held;
    if (beside == Beside::kOnceEnded) amount -= used.ending;
    return amount;
  };
  if (!tenant.empty()) {
    const auto found = tenants_.find(tenant);
    const Amount used = found == tenants_.end() ? Amount() : counted(found->second);
    if (const auto over = Over(used, more, tenant_max_)) return {Exceeded::kTenant, *over};
  }
  if (const auto over = Over(counted(total_), more, max_)) return {Exceeded::kTotal, *over};
  return {};
}

void PoolBudget::Take(const std::string& tenant, const Amount& amount) {
  for (Used* used : {&total_, &tenants_[tenant]}) used->held += amount;
}

void PoolBudget::BeginEnd(const std::string& tenant, const Amount& amount) {
  for (Used* used : {&total_, &tenants_.at(tenant)}) used->ending += amount;
}

void PoolBudget::GiveBack(const std::string& tenant, const Amount& amount) {
  const auto found = tenants_.find(tenant);
  for (Used* used : {&total_, &found->second}) {
    used->held -= amount;
    used->ending -= amount;
  }
  const Amount& held = found->second.held;
  if (held.pools == 0 && held.descriptors == 0) tenants_.erase(found);
}

}  // namespace crumb::server
