// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "server/tenants/tenant_file.h"

namespace crumb::server {

// Decides whether a fragment fits in its tenant's quota of bytes. Summing a tenant's pages costs a
// read of each of its keyspaces under the tiers' locks, so a sum is used for kSumAge, and grants in
// the meantime are added to it. Pages that leave within that time count until it is over, and so do
// fragments that were granted and then not stored. A sum misses the fragments that are being
// committed while it is taken, by which the quota may be exceeded. Thread-safe.
class TenantQuotas {
 public:
  // Time for which a sum is used before it is taken again.
  static constexpr Duration kSumAge = std::chrono::milliseconds(10);

  // `used_bytes` returns the bytes of a tenant's pages in all tiers. `clock` must outlive this.
  TenantQuotas(const Clock& clock, std::function<uint64_t(const std::string& tenant)> used_bytes)
      : clock_(clock), used_bytes_(std::move(used_bytes)) {}

  // Counts `bytes` more. kResourceExhausted, and nothing is counted: they would pass the quota. A
  // quota of 0 is no limit.
  absl::Status Take(const Tenant& tenant, uint64_t bytes);

 private:
  struct Sum {
    uint64_t bytes = 0;
    TimePoint valid_until;
  };

  const Clock& clock_;
  const std::function<uint64_t(const std::string&)> used_bytes_;
  Mutex mutex_;
  // One for each tenant of the file and of files before, which are few.
  std::map<std::string, Sum> sums_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
