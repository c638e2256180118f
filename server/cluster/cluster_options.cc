// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/cluster_options.h"

#include "common/status_macros.h"

namespace crumb::server {
namespace {

constexpr int64_t kCountMax = int64_t{1} << 30;
constexpr int64_t kThreadsMax = 64;
constexpr int64_t kReplicasMax = 8;
// Lower limit of one offer, which bounds push_batch_pages of other nodes.
constexpr int64_t kPushPagesMin = 1024;
constexpr int64_t kNodesMax = 65'536;
// The shortest time that an etcd lease can be granted for, and that a watch can react to.
constexpr Duration kTtlMin = std::chrono::seconds(1);
constexpr Duration kTimeMin = std::chrono::milliseconds(1);
constexpr double kWeightMax = 1e6;

}  // namespace

void ClusterOptions::Visit(ConfigVisitor& visitor) {
  VisitMembership(visitor);
  VisitTransfers(visitor);
  VisitPeerBounds(visitor);
}

void ClusterOptions::VisitMembership(ConfigVisitor& visitor) {
  visitor.Field("secret_file", secret_file,
                "File with the secret that tenants' salts are made of, the same on every node. "
                "Empty: a secret of this node's own, kept in its store.");
  visitor.Field("name", name, "Name of the cluster; nodes of another one are refused.");
  visitor.Field("etcd", etcd, "HOST:PORT of etcd's members. Empty: no etcd.");
  visitor.Section("etcd_access", [&] { etcd_access.Visit(visitor); });
  visitor.Field("etcd_prefix", etcd_prefix, "Prefix of the names of all keys in etcd.");
  visitor.Field(
      "nodes", nodes,
      "HOST:PORT of the gRPC of every node, instead of etcd. Both empty: one node alone.");
  visitor.Field("advertise", advertise,
                "HOST:PORT that other nodes reach this one's gRPC at. Empty: listen.tcp.");
  visitor.Field("host", host,
                "Name of the machine: no run has two replicas on one. Empty: the system's name.");
  visitor.Field("zone", zone, "Replicas go to distinct zones where there are some.");
  visitor.Field("weight", weight, "Share of the runs that this node is home of.");
  visitor.Field("replicas", replicas, {.least = 1, .most = kReplicasMax}, "Homes of each run.");
  visitor.Field("lookup_deadline", lookup_deadline, {.least = kTimeMin},
                "Longest time that a request waits for other nodes.");
  visitor.Field("rpc_deadline", rpc_deadline, {.least = kTimeMin},
                "Deadline of calls to etcd, and of calls to nodes "
                "that no request waits for.");
  visitor.Field("heartbeat", heartbeat, {.least = kTimeMin},
                "Between two hellos to a node of the static list.");
  visitor.Field("node_ttl", node_ttl, {.least = kTtlMin},
                "A silent node leaves the view after this time; the etcd lease's time.");
  visitor.Field("start_deadline", start_deadline, {.least = kTimeMin},
                "Longest time that a start waits for the drops of other nodes, and after which a "
                "node that responds without its records makes pages withheld.");
  visitor.Field("serve_unsynced", serve_unsynced,
                "Serve pages from before the start although neither another node nor etcd has "
                "sent the drops of the time in between.");
  visitor.Field("nodes_max", nodes_max, {.least = 1, .most = kNodesMax},
                "Nodes of a view; more are refused.");
  visitor.Field("connect_ahead", connect_ahead, {.most = kNodesMax},
                "While there are at most so many other nodes, each is connected to when it joins; "
                "else at the first request.");
}

void ClusterOptions::VisitTransfers(ConfigVisitor& visitor) {
  visitor.Field("pulls_max", pulls_max, {.least = 1, .most = kCountMax},
                "Requests that fetch from other nodes at once; more are misses.");
  visitor.Field("pulls_per_tenant_max", pulls_per_tenant_max, {.least = 1, .most = kCountMax},
                "Part of pulls_max for keyspaces of one tenant.");
  visitor.Field("pull_queue", pull_queue, {.least = 1, .most = kCountMax},
                "Steps of fetches waiting for a thread.");
  visitor.Field("pull_threads", pull_threads, {.least = 1, .most = kThreadsMax},
                "Threads that make fetched pages visible.");
  visitor.Field("push", push, {"always", "reused"},
                "Policy for copies of committed pages at their homes: always, or reused: none, "
                "homes refer readers to the nodes that have them.");
  visitor.Field("push_queue_pages", push_queue_pages, {.least = 1, .most = kCountMax},
                "Pages waiting to be offered to their homes; more are dropped.");
  visitor.Field("push_batch_pages", push_batch_pages, {.least = 1, .most = 1024},
                "Pages offered in one call.");
  visitor.Field("pushes_max", pushes_max, {.least = 1, .most = 64}, "Offers to one node at once.");
  visitor.Field("push_deadline", push_deadline, {.least = kTimeMin},
                "Time for a home to fetch offered pages.");
  visitor.Field("push_attempts", push_attempts, {.least = 1, .most = 100},
                "Offers of a page to a home; a page that it has not taken then is dropped.");
  visitor.Field("push_retry", push_retry, {.least = kTimeMin},
                "Pause before the second one; each is twice the one before.");
  visitor.Field("directory_pages_max", directory_pages_max, {.least = 1, .most = kCountMax},
                "Pages of which this node, as their home, knows the holders; about 350 bytes each. "
                "crumbd also remembers the run of as many pages, at most 262,144, in 170 bytes "
                "each.");
  visitor.Field("reoffer_pages_per_second", reoffer_pages_per_second,
                {.least = 1, .most = kCountMax},
                "Pages of this node that are offered to new homes, in a second.");
}

void ClusterOptions::VisitPeerBounds(ConfigVisitor& visitor) {
  visitor.Field("peer_leases_max", peer_leases_max, {.least = 1, .most = kCountMax},
                "Leases of other nodes at once; further responses have no lease.");
  visitor.Field("peer_leases_per_node_max", peer_leases_per_node_max,
                {.least = 1, .most = kCountMax}, "Part of peer_leases_max for one node.");
  visitor.Field("peer_lease_pages_max", peer_lease_pages_max, {.least = 1, .most = kCountMax},
                "Pages in all leases of one other node.");
  visitor.Field("peer_reads_max", peer_reads_max, {.least = 1, .most = kCountMax},
                "Fetches of one other node at once, by gRPC and UCX together; more are busy.");
  visitor.Field("peer_push_pages_max", peer_push_pages_max,
                {.least = kPushPagesMin, .most = kCountMax},
                "Pages that this node fetches at once because one other node offered them; offers "
                "of more are made again later.");
  visitor.Field("peer_lease", peer_lease, {.least = kTimeMin},
                "Longest time that another node keeps a lease.");
  visitor.Field("breaker_failures", breaker_failures, {.least = 1, .most = 1000},
                "Failures in a row after which no request is sent to a node for a while.");
  visitor.Field("breaker_open", breaker_open, {.least = kTimeMin},
                "How long none is sent to it then.");
  visitor.Field("deletions_max", deletions_max, {.least = 1, .most = 16'384},
                "Deleted pages of a keyspace that are remembered for nodes that are away; a node "
                "that was away longer deletes all its pages of the keyspace.");
}

absl::Status ClusterOptions::Validate(const std::string& tcp) const {
  CRUMB_RETURN_IF_ERROR(CheckValues("cluster", *this));
  if (!(weight > 0 && weight <= kWeightMax)) {
    return absl::InvalidArgumentError("cluster.weight must be above 0 and at most 1000000");
  }
  CRUMB_RETURN_IF_ERROR(etcd_access.Validate());
  return enabled() ? CheckEnabled(tcp) : absl::OkStatus();
}

absl::Status ClusterOptions::CheckEnabled(const std::string& tcp) const {
  if (!etcd.empty() && !nodes.empty()) {
    return absl::InvalidArgumentError("cluster.etcd and cluster.nodes are both set: choose one");
  }
  if (tcp.empty()) {
    return absl::InvalidArgumentError("a cluster needs listen.tcp: other nodes call it");
  }
  if (secret_file.empty()) {
    return absl::InvalidArgumentError(
        "a cluster needs cluster.secret_file, the same on every node: without it no node finds "
        "the pages of another");
  }
  if (name.empty() || etcd_prefix.empty()) {
    return absl::InvalidArgumentError("cluster.name and cluster.etcd_prefix must not be empty");
  }
  if (heartbeat >= node_ttl) {
    return absl::InvalidArgumentError("cluster.heartbeat must be less than cluster.node_ttl");
  }
  return absl::OkStatus();
}

}  // namespace crumb::server
