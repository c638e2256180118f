// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/page_key.h"
#include "crumb/acquire.h"
#include "crumb/keyspace_info.h"

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

// The nodes of a cluster as one crumbd sees them.
struct NodeList {
  struct Node {
    std::string id;
    std::string address;
    std::string version;
    bool self = false;
    std::string state;  // active, draining, drained
    bool up = false;
    double weight = 0;
    std::string host;
    std::string zone;
    uint64_t capacity_bytes = 0;
    std::string transport;       // how pages are read from it: ucx, grpc; empty for `self`
    std::string breaker;         // closed, open, half-open
    uint64_t pages_to_push = 0;  // of a draining `self`
  };
  std::vector<Node> nodes;
  uint64_t view_epoch = 0;  // 0: no cluster
  uint64_t previous_epoch = 0;
  std::vector<std::string> refused;  // nodes that cannot take part, and why
  std::string trouble;               // what is wrong with etcd; empty: nothing
};

// Where a page belongs and where it is: ids of nodes.
struct PageLocation {
  KeyspaceId keyspace;
  PageKey run;  // begins its run; zeros: not known
  std::vector<std::string> homes;
  std::vector<std::string> previous_homes;
  std::vector<std::string> holders;
  std::vector<std::string> silent;  // did not answer in time
};

}  // namespace crumb::client
