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

// CacheStats has crumbd's capacities, contents and counters at one moment.
struct CacheStats {
  struct TierStats {
    Tier tier = Tier::kUnknown;
    uint64_t capacity_bytes = 0;
    uint64_t resident_bytes = 0;
    uint64_t resident_logical_bytes = 0;  // size of the same pages in BF16
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
  std::map<std::string, uint64_t> lookup_tokens;  // keyed by tier name
  std::map<std::string, uint64_t> counters;
};

// NodeList has the nodes of a cluster as one crumbd sees them.
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
    std::string transport;       // how this node reads pages from it: ucx or grpc; empty for `self`
    std::string breaker;         // closed, open, half-open
    uint64_t pages_to_push = 0;  // set for a draining `self`
  };
  std::vector<Node> nodes;
  uint64_t view_epoch = 0;  // 0: no cluster
  uint64_t previous_epoch = 0;
  std::vector<std::string> refused;  // nodes that cannot take part, each with the reason
  std::string trouble;               // the present problem with etcd; empty: none
};

// PageLocation has the ids of the nodes to which a page belongs and of those that have it.
struct PageLocation {
  KeyspaceId keyspace;
  PageKey run;  // key of the first page of its page run; zeros: unknown
  std::vector<std::string> homes;
  std::vector<std::string> previous_homes;
  std::vector<std::string> holders;
  std::vector<std::string> silent;  // nodes that did not respond in time
};

}  // namespace crumb::client
