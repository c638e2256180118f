// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "crumb/keyspace_info.h"
#include "crumb/tier.h"

namespace crumb::client {

// crumbd's figures at one moment.
struct CacheStats {
  struct TierStats {
    Tier tier = Tier::kUnknown;
    uint64_t capacity_bytes = 0;
    uint64_t resident_bytes = 0;
    uint64_t resident_logical_bytes = 0;  // what the same pages would take in BF16
    uint64_t pages = 0;
    uint64_t evicted_pages = 0;
    std::string state;
  };
  struct KeyspaceStats {
    KeyspaceId id;
    std::string model;
    uint64_t generation = 0;
    KeyspaceState state = KeyspaceState::kUnknown;
    std::string state_reason;
  };
  std::string version;
  std::string node_id;
  double uptime_seconds = 0.0;
  std::vector<TierStats> tiers;
  std::vector<KeyspaceStats> keyspaces;
  uint32_t sessions = 0;
  uint32_t leases = 0;
  uint32_t reservations = 0;
  std::map<std::string, uint64_t> lookup_tokens;  // by tier label
  std::map<std::string, uint64_t> counters;
};

}  // namespace crumb::client
