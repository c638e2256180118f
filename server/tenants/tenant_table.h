// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "server/tenants/tenant_file.h"
#include "server/tenants/tenant_options.h"

namespace crumb::server {

// On whose behalf a call is made. The copy keeps the tenant as it was when the call began.
struct Caller {
  std::shared_ptr<const Tenant> tenant;  // null: the caller may see the keyspaces of all tenants

  // The mark of the caller's sessions and keyspaces.
  std::string name() const { return tenant == nullptr ? "" : tenant->name; }
};

// Why a caller could not be identified: it sent no token, an unknown one, an expired one, or the
// token of a session that is not there.
enum class AuthFailure : uint8_t { kMissing, kUnknown, kExpired, kSession };
inline constexpr int kAuthFailureCount = 4;
// Returns the value of the metrics' label `reason`.
const char* AuthFailureName(AuthFailure reason);

// The tenants of `tenants.file`. The daemon owns it and has Reload called every
// tenants.reload_interval. Thread-safe: the list is replaced as a whole, and callers see the old
// one or the new one.
class TenantTable {
 public:
  using WallClock = std::function<Tenant::Instant()>;

  // Reads the file. Errors name it: kNotFound; kInvalidArgument; kFailedPrecondition: everybody may
  // write to it.
  static absl::StatusOr<std::unique_ptr<TenantTable>> Open(const TenantOptions& options,
                                                           WallClock now);

  // The tenant of a token. kUnauthenticated: unknown or expired. Takes the same time whatever the
  // token. Does not block. A refusal is counted.
  absl::StatusOr<Caller> Authenticate(std::string_view token) const;
  // Counts an error and returns it, for a caller that cannot be identified.
  absl::Status Refuse(AuthFailure reason, const std::string& what) const;

  // Reads the file again, if it has changed or `always`. On an error, which is counted, everything
  // stays as it was. Blocks.
  absl::Status Reload(bool always);

  // Returns the tenant of that name; null: there is none.
  std::shared_ptr<const Tenant> Find(const std::string& name) const;
  // Returns all tenants, in the order of the file.
  std::vector<std::shared_ptr<const Tenant>> List() const;

  // Numbers of refused callers and of failed reloads, for metrics.
  uint64_t failures(AuthFailure reason) const {
    return failures_[static_cast<size_t>(reason)].value();
  }
  uint64_t reload_failures() const { return reload_failures_.value(); }

 private:
  using Tenants = std::vector<std::shared_ptr<const Tenant>>;

  TenantTable(TenantOptions options, WallClock now)
      : options_(std::move(options)), now_(std::move(now)) {}

  // Reads the file and replaces the list. REQUIRES: reading_ is held.
  absl::Status Read();
  std::shared_ptr<const Tenants> Current() const {
    MutexLock lock(&mutex_);
    return tenants_;
  }

  const TenantOptions options_;
  const WallClock now_;
  mutable std::array<Counter, kAuthFailureCount> failures_;
  Counter reload_failures_;
  Mutex reading_;                               // held over reading
  std::string seen_ ABSL_GUARDED_BY(reading_);  // identifies the version of the file
  mutable Mutex mutex_;
  std::shared_ptr<const Tenants> tenants_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
