// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/sha256.h"

namespace crumb::server {

// A tenant: a user of crumbd whose pages are apart from those of all others. Immutable once it was
// read; calls hold it by reference count, so a reload does not change a call in progress.
struct Tenant {
  using Instant = std::chrono::system_clock::time_point;

  std::string name;
  std::vector<Digest> tokens;      // SHA-256 of each: more than one while a token is replaced
  uint64_t quota_bytes = 0;        // limit of pages in host memory and on SSD together; 0: no limit
  std::optional<Instant> expires;  // none: never
};

// Reads the JSON of docs/security.md, "Tenants". kInvalidArgument naming `where` and the tenant:
// not JSON, unknown or missing fields, values of the wrong kind or out of bounds, two tenants of
// one name or token, more than `tenants_max`. All or nothing: one bad tenant refuses the whole
// text.
absl::StatusOr<std::vector<Tenant>> ParseTenants(std::string_view text, const std::string& where,
                                                 size_t tenants_max);

}  // namespace crumb::server
