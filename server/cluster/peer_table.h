// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "server/cluster/peer.h"
#include "server/cluster/view.h"

namespace crumb::server {

// The nodes of the cluster as peers, and the homes of runs in the two newest views. The cluster
// owns it and replaces its content when nodes change; requests look nodes up. Thread-safe.
class PeerTable {
 public:
  using Peers = std::vector<std::shared_ptr<Peer>>;

  PeerTable(std::string self, size_t replicas) : self_(std::move(self)), replicas_(replicas) {}

  // Makes `peers` all there are. Those that are not named are let go.
  void SetPeers(const Peers& peers);
  // Returns the node of that id; null: it is unknown, or this node.
  std::shared_ptr<Peer> Find(const std::string& id) const;
  // Returns all other nodes, sorted by id.
  Peers All() const;

  ViewHistory& history() { return history_; }
  const ViewHistory& history() const { return history_; }

  // Ids of the homes of a run in the newest view but this node, best first.
  std::vector<std::string> HomesToPush(const PageKey& run) const;
  // The homes in either view but this node; those of the newest view first.
  Peers HomesToQuery(const PageKey& run) const;

  // Whether this node is a home of the run in either view.
  bool IsHome(const PageKey& run) const;

  // Ids of the homes in the newest and in the previous view.
  struct Homes {
    std::vector<std::string> current;
    std::vector<std::string> previous;
  };
  // Returns them, this node included, best first.
  Homes HomesOfRun(const PageKey& run) const;

 private:
  // Returns the ids of the run's homes in one view, best first.
  std::vector<std::string> IdsOf(const View& view, const PageKey& run) const;

  const std::string self_;
  const size_t replicas_;
  ViewHistory history_;
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<Peer>> peers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
