// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/tenants/tenant_table.h"

#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "common/errno_status.h"
#include "common/json_file.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr int64_t kFileBytesMax = 4 << 20;

// Compares without an early end, so that the duration reveals nothing about the digests.
bool Matches(const Digest& a, const Digest& b) {
  unsigned differences = 0;
  for (size_t i = 0; i < a.size(); ++i) differences |= static_cast<unsigned>(a[i] ^ b[i]);
  return differences == 0;
}

absl::StatusOr<std::string> VersionOf(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return ErrnoStatus(errno, "tenants.file: " + path);
  if ((status.st_mode & S_IWOTH) != 0) {
    return absl::FailedPreconditionError("tenants.file: everybody may write to " + path +
                                         ": take that right away");
  }
  return fmt::format("{} {} {} {}.{}", status.st_dev, status.st_ino, status.st_size,
                     status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
}

}  // namespace

const char* AuthFailureName(AuthFailure reason) {
  static constexpr const char* kNames[kAuthFailureCount] = {"missing", "unknown", "expired",
                                                            "session"};
  return kNames[static_cast<size_t>(reason)];
}

absl::StatusOr<std::unique_ptr<TenantTable>> TenantTable::Open(const TenantOptions& options,
                                                               WallClock now) {
  std::unique_ptr<TenantTable> table(new TenantTable(options, std::move(now)));
  CRUMB_RETURN_IF_ERROR(table->Reload(true));
  return table;
}

absl::Status TenantTable::Reload(bool always) {
  MutexLock lock(&reading_);
  const auto version = VersionOf(options_.file);
  if (!always && version.ok() && *version == seen_) return absl::OkStatus();
  const absl::Status read = version.ok() ? Read() : version.status();
  // One look at a bad file is enough, until it changes again.
  seen_ = version.ok() ? *version : "";
  if (!read.ok()) reload_failures_.Add();
  return read;
}

absl::Status TenantTable::Read() {
  CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadFile(options_.file, kFileBytesMax));
  CRUMB_ASSIGN_OR_RETURN(std::vector<Tenant> read,
                         ParseTenants(text, "tenants.file: " + options_.file,
                                      static_cast<size_t>(options_.tenants_max)));
  auto tenants = std::make_shared<Tenants>();
  for (Tenant& tenant : read) tenants->push_back(std::make_shared<Tenant>(std::move(tenant)));
  LogInfo("{} tenants from {}", tenants->size(), options_.file);
  MutexLock lock(&mutex_);
  tenants_ = std::move(tenants);
  return absl::OkStatus();
}

absl::Status TenantTable::Refuse(AuthFailure reason, const std::string& what) const {
  failures_[static_cast<size_t>(reason)].Add();
  return absl::UnauthenticatedError(what);
}

absl::StatusOr<Caller> TenantTable::Authenticate(std::string_view token) const {
  const Digest digest = Sha256(token);
  const auto tenants = Current();
  Caller caller;
  for (const auto& tenant : *tenants) {
    for (const Digest& known : tenant->tokens) {
      if (Matches(known, digest)) caller.tenant = tenant;
    }
  }
  if (caller.tenant == nullptr) return Refuse(AuthFailure::kUnknown, "the token is no tenant's");
  if (caller.tenant->expires.has_value() && now_() >= *caller.tenant->expires) {
    return Refuse(AuthFailure::kExpired,
                  "the token of tenant '" + caller.tenant->name + "' has expired");
  }
  return caller;
}

std::shared_ptr<const Tenant> TenantTable::Find(const std::string& name) const {
  const auto tenants = Current();
  for (const auto& tenant : *tenants) {
    if (tenant->name == name) return tenant;
  }
  return nullptr;
}

std::vector<std::shared_ptr<const Tenant>> TenantTable::List() const { return *Current(); }

}  // namespace crumb::server
