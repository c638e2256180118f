// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "common/thread.h"
#include "server/cluster/peer_table.h"
#include "server/cluster/pusher.h"
#include "server/cluster/run_finder.h"
#include "server/keyspaces/keyspace_registry.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Offers the pages that this node holds to homes whose directory may not list it: nodes that are
// new, processes whose directory was lost in a restart, and nodes that became homes because another
// one came or left. Homes receive keys, 32 bytes a page; they fetch nothing.
//
// Runs on its own thread, which walks all pages after each change of the nodes, at most
// `pages_per_second`. A walk that ends has sent every page to the homes of its view; the next walk
// sends the difference. Pages that are committed during a walk are offered by the Pusher.
// Thread-safe.
class Reoffer {
 public:
  // The references must outlive this.
  struct Parts {
    storage::TieredStore& store;
    const KeyspaceRegistry& keyspaces;
    PeerTable& peers;
    RunFinder& runs;
    Pusher& pusher;
    size_t replicas = 1;
    int64_t pages_per_second = 5000;
  };

  explicit Reoffer(const Parts& parts)
      : parts_(parts), thread_("crumb-reoffer", [this] { Run(); }) {}
  ~Reoffer() { Stop(); }

  // Notes that the view or a node's process is another one, and starts a walk, after the one in
  // progress.
  void NodesChanged();
  // Ends the thread. Idempotent.
  void Stop();

  // Returns the number of walks that have ended.
  uint64_t walks() const;

 private:
  // The nodes that a walk sends to: the view, and the process of each node.
  struct Nodes {
    std::shared_ptr<const View> view;
    std::map<std::string, std::string> incarnations;
  };

  void Run();
  // Waits for NodesChanged. Returns false if it is stopping.
  bool WaitForChange();
  // Waits until `due`. False: stopping.
  bool Pace(std::chrono::steady_clock::time_point due);
  // Waits until the pusher takes another copy. False: stopping.
  bool WaitForRoom();
  Nodes NodesNow() const;
  // Goes through all pages. Returns false if it is stopping.
  bool Walk(const Nodes& now);
  // Offers the ranges of a page that this node holds to the homes that may not list it.
  void OfferPage(const Nodes& now, const Keyspace& keyspace, const PageKey& key);
  // Returns the homes of the run that were not its homes, or were other processes, in the last
  // walk.
  std::vector<std::string> NewHomesOf(const Nodes& now, const PageKey& run) const;

  const Parts parts_;
  Nodes sent_;  // nodes of the last walk that ended; only the thread uses it

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool pending_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t walks_ ABSL_GUARDED_BY(mutex_) = 0;
  Thread thread_;
};

}  // namespace crumb::server
