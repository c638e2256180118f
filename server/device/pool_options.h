// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "common/config_visitor.h"

namespace crumb::server {

// Device pools whose descriptors crumbd keeps. They are the section device_pools of crumbd's
// configuration; docs/config.md has its keys.
struct PoolOptions {
  int64_t pools_max = 64;         // 0: crumbd keeps no pools, and says so in its welcome
  int64_t handles_max = 4096;     // limit for one pool
  int64_t slots_max = 1'048'576;  // limit for all pools together
  // Descriptors of handles and rosters of all pools. 0: half of RLIMIT_NOFILE when crumbd starts;
  // the other half is for sockets, extents and slabs.
  int64_t descriptors_max = 0;
  // Percentage of pools_max, slots_max and descriptors_max that one tenant may have.
  int64_t tenant_percent = 50;
  int64_t named_max = 32;                        // pools that one Acquire looks into
  Duration keep_for = std::chrono::minutes(10);  // a pool that no process takes part in
  // Likewise, while another tenant needs its memory, descriptors or slots.
  Duration keep_from_others = std::chrono::seconds(30);

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound.
  absl::Status Validate() const;
};

}  // namespace crumb::server
