// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/config_visitor.h"

namespace crumb::server {

// Access of tenants: the section tenants of the configuration, described in docs/security.md.
struct TenantOptions {
  std::string file;  // empty: callers need no token, and name their tenant themselves
  // Whether tenants may open sessions: "off" not, "own" with slabs of their own, "all" with all
  // slabs.
  std::string shared_memory = "off";  // "off", "own" or "all"
  int64_t tenants_max = 256;
  // Percentage of the rest of a bound, which other tenants leave, that one tenant may have.
  int64_t part_max_percent = 50;  // TenantBudget
  Duration reload_interval = std::chrono::seconds(10);

  bool enabled() const { return !file.empty(); }
  // The percentage for TenantBudget; 100 if the server does not distinguish tenants.
  int64_t budget_percent() const { return enabled() ? part_max_percent : 100; }
  // Each tenant's pages lie in slabs of its own.
  bool own_slabs() const { return enabled() && shared_memory == "own"; }

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound.
  absl::Status Validate() const;
};

}  // namespace crumb::server
