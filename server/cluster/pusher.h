// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "server/cluster/cluster_metrics.h"
#include "server/cluster/peer_sessions.h"
#include "server/cluster/peer_table.h"
#include "server/cluster/run_finder.h"
#include "server/keyspace_registry.h"

namespace crumb::server {

// Offers committed pages to their homes, which fetch what they lack. In the background, in batches,
// a few at a time to each node; what does not fit in the queue is dropped and counted: the page is
// here, and a home that lacks it costs a miss. Thread-safe.
class Pusher {
 public:
  struct Options {
    size_t queue_pages = 16'384;
    size_t batch_pages = 64;
    int64_t pushes_max = 2;  // to one node at once
    Duration deadline = std::chrono::seconds(10);
  };

  // The references must outlive this.
  Pusher(const Options& options, PeerTable& peers, RunFinder& runs, PeerSessions& sessions,
         const KeyspaceRegistry& keyspaces, const Clock& clock, ClusterMetrics& metrics);
  ~Pusher();

  // Queues a fragment that is in the store. False: dropped.
  bool Offer(const FragmentHeader& header);

  // Waits until something has left a full queue, Stop was called, or `deadline`.
  void WaitForRoom(TimePoint deadline);
  // Pages queued or offered and not answered.
  size_t pending() const;

  // Drops what is queued and waits for offers under way. Idempotent.
  void Stop();

 private:
  struct Item {
    KeyspaceId keyspace;
    PageKey key;
    TileRange range;
    uint32_t tile_bytes = 0;
  };
  struct Outgoing {
    std::deque<Item> items;
    int64_t under_way = 0;
  };

  void Run();
  void Route(const FragmentHeader& header);
  // Starts offers to `node` while it may have more.
  void Pump(const std::string& node);
  std::vector<Item> TakeBatch(Outgoing& outgoing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Send(const std::shared_ptr<Peer>& peer, const std::vector<Item>& batch);
  void Ended(const std::string& node, size_t pages);

  const Options options_;
  PeerTable& peers_;
  RunFinder& runs_;
  PeerSessions& sessions_;
  const KeyspaceRegistry& keyspaces_;
  const Clock& clock_;
  ClusterMetrics& metrics_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<FragmentHeader> queue_ ABSL_GUARDED_BY(mutex_);  // without sums; not routed yet
  size_t routing_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);
  size_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;    // items of all nodes
  size_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;  // pages offered
  size_t offers_ ABSL_GUARDED_BY(mutex_) = 0;     // calls
  Thread thread_;
};

}  // namespace crumb::server
