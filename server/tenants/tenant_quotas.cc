// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/tenants/tenant_quotas.h"

#include "fmt/format.h"

namespace crumb::server {

absl::Status TenantQuotas::Take(const Tenant& tenant, uint64_t bytes) {
  if (tenant.quota_bytes == 0) return absl::OkStatus();
  const TimePoint now = clock_.Now();
  const auto is_valid = [&](const Sum& sum) { return now < sum.valid_until; };
  bool outdated;
  {
    MutexLock lock(&mutex_);
    outdated = !is_valid(sums_[tenant.name]);
  }
  const uint64_t used = outdated ? used_bytes_(tenant.name) : 0;  // read without the lock
  MutexLock lock(&mutex_);
  Sum& sum = sums_[tenant.name];
  if (outdated && !is_valid(sum)) sum = {used, now + kSumAge};
  if (sum.bytes + bytes > tenant.quota_bytes) {
    return absl::ResourceExhaustedError(
        fmt::format("quota: tenant '{}' has {} of {} bytes, the fragment has {}", tenant.name,
                    sum.bytes, tenant.quota_bytes, bytes));
  }
  sum.bytes += bytes;
  return absl::OkStatus();
}

}  // namespace crumb::server
