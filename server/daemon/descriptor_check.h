// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/daemon/options.h"

namespace crumb::server {

// File descriptors that a configuration makes crumbd open.
struct DescriptorNeeds {
  uint64_t fixed = 0;         // RocksDB, gRPC, listeners, threads' event descriptors
  uint64_t slabs = 0;         // two of each slab, and of as many that may be taken over
  uint64_t extents = 0;       // one of each file of pages on SSD
  uint64_t sessions = 0;      // need of sessions.sessions_max processes
  uint64_t connections = 0;   // need of limits.connections_max gRPC connections
  uint64_t pool_handles = 0;  // need of device_pools.descriptors_max

  // Without these crumbd cannot serve at all; the rest comes with its callers.
  uint64_t certain() const { return fixed + slabs + extents; }
  uint64_t all() const { return certain() + sessions + connections + pool_handles; }
};
// Returns the needs of a configuration: upper bounds, from the settings that bound each kind.
DescriptorNeeds DescriptorNeedsOf(const Options& options);

// Compares the needs with this process's RLIMIT_NOFILE, and raises its soft limit to the hard one
// if necessary. Returns the findings, line by line. kResourceExhausted, naming limit and settings:
// the hard limit is below the certain needs, so crumbd would fail later, in the middle of its work.
absl::StatusOr<std::vector<std::string>> CheckDescriptors(const DescriptorNeeds& needs);

}  // namespace crumb::server
