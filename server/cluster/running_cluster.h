// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/executor.h"
#include "common/holder_directory.h"
#include "common/mutex.h"
#include "server/cluster/cluster.h"
#include "server/cluster/drain.h"
#include "server/cluster/grpc_peer.h"
#include "server/cluster/locate.h"
#include "server/cluster/page_source.h"
#include "server/cluster/pusher.h"
#include "server/cluster/record_merger.h"
#include "server/cluster/reoffer.h"
#include "storage/deadline_timer.h"

namespace crumb::server {

// The implementation of Cluster: it owns the parts of the cluster layer and connects them. The life
// of the object, from Open to Stop, is in cluster.cc; nodes, views and reports on them are in
// cluster_nodes.cc. Thread-safe.
class RunningCluster final : public Cluster {
 public:
  RunningCluster(Parts parts, std::string incarnation);
  ~RunningCluster() override { Stop(); }

  // Opens the UCX transport, if transport.listen is set, and logs a self-test of it.
  absl::Status OpenTransport();

  absl::Status Join(const std::string& address) override;
  void Stop() override;

  void Pull(PullRequest request, std::function<void(PullResult)> done) override {
    if (peers_.All().empty()) return done({0, MissReason::kNone});
    reader_.Pull(std::move(request), std::move(done));
  }
  void Find(PullRequest request, std::function<void(FoundPages)> done) override {
    if (peers_.All().empty()) return done({});
    reader_.Find(std::move(request), std::move(done));
  }
  Duration lookup_deadline() const override { return parts_.options.lookup_deadline; }

  void Committed(const FragmentHeader& header) override { pusher_.Offer(header); }

  absl::Status NoteDeletion(const KeyspaceId& keyspace, const std::vector<PageKey>& keys) override {
    holders_.ForgetPages(keyspace, keys);
    return parts_.keyspaces.NoteDeletion(keyspace, parts_.node_id, keys,
                                         static_cast<size_t>(parts_.options.deletions_max));
  }

  void ListNodes(v1::ListNodesResponse* response) override;
  void Locate(const v1::LocatePageRequest& request, v1::LocatePageResponse* response,
              std::function<void(absl::Status)> done) override {
    LocatePage({parts_.store, parts_.keyspaces, peers_, runs_, parts_.clock, parts_.node_id},
               request, response, std::move(done));
  }
  void DrainNode(const std::string& node, std::function<void(absl::Status)> done) override;

  const PeerCallContext& calls() const override { return calls_; }
  transport::FragmentSource& source() override { return source_; }
  const ClusterMetrics& metrics() const override { return metrics_; }
  Gauges gauges() const override;
  const transport::Transport* transport() const override { return transport_.get(); }

 private:
  PullContext MakePullContext();
  PeerCallContext MakeCallContext();

  // Fills this node's record; `address` is that of its gRPC.
  void FillSelf(const std::string& address);

  v1::NodeRecord Self() const {
    MutexLock lock(&mutex_);
    return self_;
  }

  // Makes the membership by etcd or by a list of addresses, as the options say, and starts it.
  std::unique_ptr<Membership> MakeMembership();

  // Returns the page of own keyspace records that changed after change number `after`.
  Membership::OwnPage OwnPageAfter(uint64_t after) const;
  // Sends keyspace records to all peers. `failed` is called for each peer that did not take them.
  void SendToPeers(Membership::Keyspaces keyspaces, const std::function<void()>& failed);
  std::shared_ptr<Peer> MakePeer(const v1::NodeRecord& record, size_t nodes);
  // Replaces peers and view by those of `nodes`. Called on the membership's thread, one at a time.
  void InstallNodes(Membership::Nodes nodes);
  void InstallView(const Membership::Nodes& nodes);
  void LogRefused(const std::vector<std::string>& refused);
  absl::Status BeginDrain();
  void SetState(v1::NodeState state);
  // Ends expired leases of other nodes, now and periodically.
  void ScheduleReap();

  const Parts parts_;
  const std::string incarnation_;
  const PeerChannel channel_;
  bool stopped_ = false;
  ClusterMetrics metrics_;
  RecordMerger merger_;

  // Each member uses only members that are declared above it.
  const std::shared_ptr<OutgoingCalls> calls_in_progress_;
  const std::shared_ptr<OutgoingCalls> hellos_;
  PeerTable peers_;
  PeerSessions sessions_;
  PeerLeases leases_;
  PageSource source_;
  HolderDirectory holders_;
  RunFinder runs_;
  PageFlights flights_;
  storage::DeadlineTimer timer_;
  std::unique_ptr<transport::Transport> transport_;
  Executor steps_;
  Executor blocking_;
  RemoteReader reader_;
  // Pages that this node fetches for offers, counted for the node that offered them.
  PartyBudget push_pages_;
  Pusher pusher_;
  Drain drain_;
  Reoffer reoffer_;
  const PeerCallContext calls_;

  mutable Mutex mutex_;
  v1::NodeRecord self_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> refused_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Membership> membership_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
