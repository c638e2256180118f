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
//
// The counters count since crumbd's start; capacities, contents and numbers of sessions, leases and
// reservations are the present ones. `keyspaces` has only those that the caller's tenant may see;
// `counters` has every counter of /metrics that has no labels, by its name there.
struct CacheStats {
  // The state of one tier of the node. `state` is "active", "read-only: REASON" or "off: REASON";
  // an operator reads there why an SSD tier stopped to take pages.
  struct TierStats {
    Tier tier = Tier::kUnknown;
    uint64_t capacity_bytes = 0;
    uint64_t resident_bytes = 0;
    uint64_t resident_logical_bytes = 0;  // size of the same pages in BF16
    uint64_t pages = 0;
    uint64_t evicted_pages = 0;
    std::string state;
  };
  // A keyspace that crumbd knows. `state_reason` is the text that was recorded with the last change
  // of its state.
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

// NodeList has the nodes of a cluster as one crumbd sees them. `up`, `transport` and `breaker` are
// this node's view of its peers; another node may see a peer differently.
struct NodeList {
  // A member of the cluster. `weight` is relative to those of the other nodes: a node with twice
  // the weight is home of twice as many page runs. Copies of a page are placed in distinct zones if
  // there are several. `breaker` is open while requests to the node are given up at once because
  // they failed before.
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

// PageLocation has the ids of the nodes to which a page belongs and of those that have it. `homes`
// are the nodes to which the present view assigns the page's run, `previous_homes` those of the
// view before, which may still have it while pages move. A node in `silent` may be a holder too.
struct PageLocation {
  KeyspaceId keyspace;
  PageKey run;  // key of the first page of its page run; zeros: unknown
  std::vector<std::string> homes;
  std::vector<std::string> previous_homes;
  std::vector<std::string> holders;
  std::vector<std::string> silent;  // nodes that did not respond in time
};

}  // namespace crumb::client
