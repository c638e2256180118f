// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/config_visitor.h"
#include "server/cluster/etcd/etcd_access.h"

namespace crumb::server {

// The policy of a home for the pages that it is offered: it fetches some, and notes the holders of
// all.
enum class PushPolicy : uint8_t {
  kReused,  // those of a node that leaves, and parts that only together make a page
  kAlways,  // those that it lacks
};

// The nodes that this one shares pages with, and how: docs/cluster.md. docs/config.md, "cluster",
// has the effect of each field. `_max` counts calls or leases at once unless the name ends in
// _pages_max; `_queue` counts waiting tasks.
struct ClusterOptions {
  std::string secret_file;        // empty: a secret of this node, made once, beside the index
  std::string name = "crumb";     // nodes of another cluster are refused
  std::vector<std::string> etcd;  // HOST:PORT each; empty: no etcd
  EtcdAccess etcd_access;
  std::string etcd_prefix = "/crumb/";
  std::vector<std::string> nodes;  // HOST:PORT of every node's gRPC; with etcd: none
  std::string advertise;           // HOST:PORT that others reach listen.tcp at; empty: listen.tcp
  // Host and zone of this node. Replicas of a page run go to different zones if there are enough,
  // and never to one host.
  std::string host;  // empty: the machine's name
  std::string zone;
  // The part of page runs that hash to this node, relative to other nodes' weights; 0 is not
  // allowed.
  double weight = 1;
  int64_t replicas = 1;
  // Longest wait of a caller for other nodes, and the deadline of calls that no caller waits for.
  Duration lookup_deadline = std::chrono::milliseconds(250);
  Duration rpc_deadline = std::chrono::seconds(2);
  // Time between hellos, time after which a silent node leaves the view, and longest wait of Join.
  Duration heartbeat = std::chrono::seconds(1);
  Duration node_ttl = std::chrono::seconds(10);
  Duration start_deadline = std::chrono::seconds(5);
  bool serve_unsynced = false;
  int64_t nodes_max = 4096;
  int64_t connect_ahead = 64;
  // Requests for pages of other nodes at a time, and the queue and threads that handle responses.
  int64_t pulls_max = 256;
  int64_t pulls_per_tenant_max = 192;
  int64_t pull_queue = 4096;
  int64_t pull_threads = 2;
  std::string push = "always";  // "always" or "reused"
  // Pages that wait to be offered to their homes, pages in one offer, and offers to one node at a
  // time.
  int64_t push_queue_pages = 16'384;
  int64_t push_batch_pages = 64;
  int64_t pushes_max = 2;
  Duration push_deadline = std::chrono::seconds(10);
  int64_t push_attempts = 5;
  Duration push_retry = std::chrono::seconds(1);
  // Pages whose holders this node notes as their home.
  int64_t directory_pages_max = 1'048'576;
  int64_t reoffer_pages_per_second = 5000;
  // Bounds of the resources that other nodes take here.
  int64_t peer_leases_max = 4096;
  int64_t peer_leases_per_node_max = 1024;
  int64_t peer_lease_pages_max = 65'536;  // limit for one node
  int64_t peer_reads_max = 1024;          // limit for one node
  int64_t peer_push_pages_max = 2048;     // limit for one node
  Duration peer_lease = std::chrono::seconds(10);
  int64_t breaker_failures = 5;
  Duration breaker_open = std::chrono::seconds(2);
  int64_t deletions_max = 4096;

  // The policy that `push` and `replicas` name. Several replicas promise that one death makes
  // nothing miss, so each of them has a copy.
  PushPolicy push_policy() const {
    return push == "always" || replicas > 1 ? PushPolicy::kAlways : PushPolicy::kReused;
  }

  // Whether this node works with others at all.
  bool enabled() const { return !etcd.empty() || !nodes.empty(); }

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound. `tcp` is listen.tcp.
  absl::Status Validate(const std::string& tcp) const;

 private:
  void VisitMembership(ConfigVisitor& visitor);
  void VisitTransfers(ConfigVisitor& visitor);
  void VisitPeerBounds(ConfigVisitor& visitor);
  // Checks the settings that only a node in a cluster needs.
  absl::Status CheckEnabled(const std::string& tcp) const;
};

}  // namespace crumb::server
