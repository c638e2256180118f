// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "crumb/v1/cache_service.pb.h"
#include "server/base/tls_options.h"
#include "server/cluster/cluster_metrics.h"
#include "server/cluster/cluster_options.h"
#include "server/cluster/membership.h"
#include "server/cluster/peer_calls.h"
#include "server/cluster/protocol_versions.h"
#include "server/cluster/remote_reader.h"
#include "server/keyspaces/keyspace_registry.h"
#include "transport/fragment_source.h"
#include "transport/transport.h"
#include "transport/transport_options.h"

namespace crumb::server {

// The other nodes as this one uses them: the view, the directory of their pages, and the transfers
// between nodes. docs/cluster.md describes the mechanism. This interface is all that calls, metrics
// and the daemon see of it; RunningCluster implements it. The daemon owns it, opens it after the
// store and the keyspaces, and stops it before them. Thread-safe; functions do not block unless
// they say so.
//
//   Open --> Join --> serving --> Stop
//
// Callbacks (`done`) run exactly once, possibly before the function returns or on any thread, and
// must not block.
class Cluster {
 public:
  // The parts of the daemon that the cluster works with.
  struct Parts {
    ClusterOptions options;
    transport::TransportOptions transport;
    TlsOptions tls;  // TLS of gRPC among nodes
    std::string node_id;
    std::string version;
    ProtocolVersions versions;
    // Bytes of host memory and SSD that this node offers, for its record.
    uint64_t capacity_bytes = 0;
    // limits.acquire_keys_max and limits.control_queue.
    size_t keys_max = 0;
    size_t control_queue = 256;
    const Clock& clock;
    storage::TieredStore& store;
    KeyspaceRegistry& keyspaces;
    // A keyspace's state was changed by another node.
    std::function<void(const KeyspaceId&)> state_changed;
  };

  // Values for /metrics that change in both directions.
  struct Gauges {
    uint64_t view_epoch = 0;
    size_t view_nodes = 0;
    size_t pulls = 0;
    size_t push_pages = 0;
    size_t directory_pages = 0;
    uint64_t directory_evicted_pages = 0;
    size_t peer_leases = 0;
    Membership::State etcd = Membership::State::kNone;
    bool withheld = false;  // some or all pages are: drops may not have been received
    size_t withheld_keyspaces = 0;
    size_t unsynced_nodes = 0;  // nodes that respond, but whose records were not taken over
    struct Node {
      std::string id;
      bool up = false;
      Breaker::State breaker = Breaker::State::kClosed;
      uint64_t breaker_opened = 0;
    };
    std::vector<Node> nodes;  // others
  };

  // Takes the transport's port, and joins no node yet. The members of `parts` must outlive this.
  static absl::StatusOr<std::unique_ptr<Cluster>> Open(Parts parts);

  virtual ~Cluster() = default;

  // Publishes this node, whose gRPC other nodes reach at `address`, and waits for at most
  // start_deadline until it has received the drops that were made while it was down. Pages of
  // keyspaces from before the start are withheld until then (Withholding).
  virtual absl::Status Join(const std::string& address) = 0;
  // Leaves, ends calls and fetches, joins threads. Before the store goes. Idempotent.
  virtual void Stop() = 0;

  // Brings pages that this node lacks from others. Calls `done` once.
  virtual void Pull(PullRequest request, std::function<void(PullResult)> done) = 0;
  // Finds the nodes that have the pages. Calls `done` once.
  virtual void Find(PullRequest request, std::function<void(FoundPages)> done) = 0;
  // A request with a waiting caller waits for other nodes no longer than this.
  virtual Duration lookup_deadline() const = 0;

  // A fragment was committed here: it is offered to its homes in the background.
  virtual void Committed(const FragmentHeader& header) = 0;
  // Pages are deleted here by a caller: other nodes are notified. Blocks on the store.
  virtual absl::Status NoteDeletion(const KeyspaceId& keyspace,
                                    const std::vector<PageKey>& keys) = 0;

  // Fills in this node and all others that it knows, with the state of each.
  virtual void ListNodes(v1::ListNodesResponse* response) = 0;
  // Finds the page on all nodes; `done` is called once, within a second.
  virtual void Locate(const v1::LocatePageRequest& request, v1::LocatePageResponse* response,
                      std::function<void(absl::Status)> done) = 0;
  // Has a node, this one or another, offer all of its pages to the homes that remain, so that it
  // can be stopped without a loss. `done` is called when the node has begun.
  virtual void DrainNode(const std::string& node, std::function<void(absl::Status)> done) = 0;

  // The context of PeerService's calls.
  virtual const PeerCallContext& calls() const = 0;
  // Returns the source that serves this node's pages to other nodes, also over gRPC.
  virtual transport::FragmentSource& source() = 0;

  // Return the counters, and values that change in both directions.
  virtual const ClusterMetrics& metrics() const = 0;
  virtual Gauges gauges() const = 0;
  // Null without a transport.
  virtual const transport::Transport* transport() const = 0;
};

}  // namespace crumb::server
