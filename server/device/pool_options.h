// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "common/config_visitor.h"

namespace crumb::server {

// Device pools whose descriptors crumbd keeps.
struct PoolOptions {
  int64_t pools_max = 64;                        // 0: none, and processes are told so
  int64_t handles_max = 4096;                    // of one pool
  int64_t slots_max = 8'388'608;                 // of all pools
  Duration keep_for = std::chrono::minutes(10);  // a pool that no process takes part in

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound.
  absl::Status Validate() const;
};

}  // namespace crumb::server
