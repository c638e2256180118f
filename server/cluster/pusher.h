// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <set>
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
#include "server/keyspaces/keyspace_registry.h"

namespace crumb::server {

// Offers committed pages to their homes, which fetch those that they lack. Offers are made in the
// background, in batches, a few at a time to each node. An offer that fails is made again, after
// growing pauses and to the homes of the newest view. Pages that no home has taken after that, and
// pages that do not fit in the queue, are dropped and counted by reason; such a page stays on this
// node, and a home that lacks it costs a miss. Pages committed while no other node is in the view
// wait for one.
//
// Copies are offered to homes, too: pages that this node read from others, and pages that the
// directory of a new home may not list. A home fetches none of them; it refers other nodes to this
// one. They take at most half of the queue, so that commits find room. Thread-safe.
class Pusher {
 public:
  // Bounds, from ClusterOptions.
  struct Options {
    size_t queue_pages = 16'384;
    size_t batch_pages = 64;
    int64_t pushes_max = 2;  // limit of offers to one node at one time
    Duration deadline = std::chrono::seconds(10);
    int64_t attempts = 5;                          // offers of a page to a home
    Duration retry_min = std::chrono::seconds(1);  // pause before the second attempt; doubles
  };

  // The references must outlive this.
  Pusher(const Options& options, PeerTable& peers, RunFinder& runs, PeerSessions& sessions,
         const KeyspaceRegistry& keyspaces, const Clock& clock, ClusterMetrics& metrics);
  ~Pusher();

  // Queues a fragment that is in the store. False: dropped.
  bool Offer(const FragmentHeader& header);
  // Queues a copy of a page that other nodes have, too; `run` is its run's first page, zeros if
  // that is to be found. False: dropped.
  bool OfferCopy(const FragmentHeader& header, const PageKey& run);
  // Queues a fragment for one home whose directory may not list it. False: dropped.
  bool OfferAgain(const std::string& home, const FragmentHeader& header, const PageKey& run);
  // Counts a page that cannot be offered at all.
  void NoteDrop(PushDrop reason) { Drop(reason, 1); }

  // Notes that the newest view is another one: pages that waited for other nodes may have homes
  // now.
  void ViewChanged();

  // Requests that homes fetch all offered pages from now on, because this node leaves.
  void SetLeaving() { leaving_ = true; }

  // Waits until something has left a full queue, Stop was called, or `deadline`.
  void WaitForRoom(TimePoint deadline);
  // Does the same for the half of the queue that copies may use. Returns whether there is room.
  bool WaitForRoomForCopies(TimePoint deadline);
  // Pages queued, offered without a response yet, or to be offered again; without those that wait
  // for another node.
  size_t pending() const;

  // Drops the queue and waits for offers in progress. Idempotent.
  void Stop();

 private:
  // A page on its way to one home.
  //
  //   Fresh --Route--> outgoing_ --Pump--> offered --taken--> done
  //                       ^                  |
  //                       |                  '--Fail--> retries_, or dropped after `attempts`
  //                       '----RouteAgain----------------'
  struct Item {
    KeyspaceId keyspace;
    PageKey key;
    PageKey run;
    TileRange range;
    uint32_t tile_bytes = 0;
    bool note_only = false;  // the home fetches nothing
    int64_t attempts = 0;    // failed attempts
  };
  // A fragment that was not routed yet.
  struct Fresh {
    FragmentHeader header;  // header without checksums
    PageKey run;            // zeros: to be found
    bool note_only = false;
  };
  struct Outgoing {
    std::deque<Item> items;
    int64_t under_way = 0;
  };
  struct Retry {
    std::string node;  // the node that did not take the item; empty: any
    Item item;
  };
  // The thread's next task.
  struct Work {
    std::deque<Fresh> fresh;
    std::vector<Retry> again;
    std::set<std::string> nodes;  // nodes that may have more items
  };

  // The thread (crumb-push): routes, and starts offers, until Stop.
  void Run();
  // Waits for work and takes all there is. Returns false if it is stopping.
  bool TakeWork(Work* work);
  // Queues a fragment, unless as many as `pages_max` wait: then it is dropped. Returns whether it
  // was queued.
  bool Queue(Fresh fresh, size_t pages_max);
  // Waits until fewer than `pages_max` wait. Returns false at the deadline or if it is stopping.
  bool WaitUntilBelow(size_t pages_max, TimePoint deadline);
  // Appends a fragment to the items of each of its homes. RouteAgain does so for an item whose
  // offer failed: to the same home, or to all homes if that is none any more.
  void Route(const Fresh& fresh);
  void RouteAgain(const Retry& retry);
  // Adds an item to those of a node.
  void Append(const std::string& node, const Item& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Keeps an item until another node is in the view; the oldest is dropped beyond queue_pages.
  void Hold(Item item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts offers to `node` as long as its limit of offers allows.
  void Pump(const std::string& node);
  // Removes and returns the items of one offer: the first one and others of its keyspace and range.
  std::vector<Item> TakeBatch(Outgoing& outgoing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the message of an offer. The session lets the home read the pages from this node.
  v1::PeerPushRequest RequestOf(const std::vector<Item>& batch,
                                const transport::SessionToken& session) const;
  void Send(const std::shared_ptr<Peer>& peer, std::vector<Item> batch,
            const transport::SessionToken& session);
  // Handles the end of an offer, on a thread of the peer.
  void TakeResponse(Peer& peer, const std::vector<Item>& batch,
                    const absl::StatusOr<v1::PeerPushResponse>& response);
  void NoteTaken(const std::string& node, const std::vector<Item>& batch,
                 const v1::PeerPushResponse& response);
  // Handles an item that was offered to `node` in vain: schedules another attempt or drops it.
  void Fail(const std::string& node, const Item& item, PushDrop reason);
  // Counts pages that are not offered any more.
  void Drop(PushDrop reason, size_t pages);
  size_t Waiting() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return queue_.size() + routing_ + waiting_;
  }

  const Options options_;
  PeerTable& peers_;
  RunFinder& runs_;
  PeerSessions& sessions_;
  const KeyspaceRegistry& keyspaces_;
  const Clock& clock_;
  ClusterMetrics& metrics_;

  std::atomic<bool> leaving_{false};

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Fresh> queue_ ABSL_GUARDED_BY(mutex_);  // fragments to be routed
  size_t routing_ ABSL_GUARDED_BY(mutex_) = 0;       // items of the thread's work
  std::map<std::string, Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);
  // Keyed by the time of the next attempt.
  std::multimap<TimePoint, Retry> retries_ ABSL_GUARDED_BY(mutex_);
  // Items that wait until another node is in the view.
  std::deque<Item> held_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> ready_ ABSL_GUARDED_BY(mutex_);  // nodes that responded to an offer
  size_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;           // items of all nodes, and retries
  size_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;         // pages offered
  size_t offers_ ABSL_GUARDED_BY(mutex_) = 0;            // calls
  Thread thread_;
};

}  // namespace crumb::server
