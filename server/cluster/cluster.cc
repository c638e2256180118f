// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/cluster.h"

#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "common/executor.h"
#include "common/logging.h"
#include "common/random_id.h"
#include "common/status_macros.h"
#include "server/cluster/drain.h"
#include "server/cluster/etcd_membership.h"
#include "server/cluster/grpc_peer.h"
#include "server/cluster/locate.h"
#include "server/cluster/node_check.h"
#include "server/cluster/page_source.h"
#include "server/cluster/pusher.h"
#include "server/cluster/record_merger.h"
#include "server/cluster/reoffer.h"
#include "server/cluster/static_membership.h"
#include "storage/deadline_timer.h"
#include "transport/ucx_transport.h"

namespace crumb::server {
namespace {

// Pages whose run is remembered: some 170 bytes each. A smaller directory bounds them further.
constexpr size_t kRememberedRuns = 1 << 18;
constexpr auto kReapInterval = std::chrono::seconds(1);
// Bytes of records in one PeerKeyspaces message; a record is 1.3 MiB at most (keyspace_merge.h), so
// that both stay below gRPC's bound of 4 MiB for a message.
constexpr size_t kRecordPageBytes = size_t{1} << 20;

std::string MachineName() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

class RunningCluster final : public Cluster {
 public:
  RunningCluster(Parts parts, std::string incarnation)
      : parts_(std::move(parts)),
        incarnation_(std::move(incarnation)),
        channel_(MakePeerChannel(parts_.tls)),
        merger_({parts_.store, parts_.keyspaces, metrics_,
                 static_cast<size_t>(parts_.options.deletions_max), parts_.state_changed,
                 [this](const KeyspaceId& keyspace, const std::vector<PageKey>& keys) {
                   holders_.ForgetPages(keyspace, keys);
                 }}),
        calls_in_progress_(std::make_shared<OutgoingCalls>()),
        hellos_(std::make_shared<OutgoingCalls>()),
        peers_(parts_.node_id, static_cast<size_t>(parts_.options.replicas)),
        sessions_(static_cast<size_t>(parts_.options.nodes_max)),
        leases_(parts_.store, parts_.clock,
                {static_cast<size_t>(parts_.options.peer_leases_max),
                 static_cast<size_t>(parts_.options.peer_leases_per_node_max),
                 static_cast<size_t>(parts_.options.peer_lease_pages_max)},
                parts_.options.peer_lease),
        source_(parts_.store, parts_.keyspaces, sessions_, metrics_,
                static_cast<size_t>(parts_.options.peer_reads_max)),
        holders_(static_cast<size_t>(parts_.options.directory_pages_max)),
        runs_(parts_.store,
              std::min(kRememberedRuns, static_cast<size_t>(parts_.options.directory_pages_max))),
        timer_(parts_.clock),
        steps_({"crumb-pull", static_cast<int>(parts_.options.pull_threads),
                static_cast<size_t>(parts_.options.pull_queue)}),
        blocking_({"crumb-merge", 1, parts_.control_queue}),
        reader_(MakePullContext(), static_cast<size_t>(parts_.options.pulls_max),
                static_cast<size_t>(parts_.options.pulls_per_tenant_max)),
        push_pages_(static_cast<size_t>(parts_.options.peer_push_pages_max)),
        pusher_(
            {static_cast<size_t>(parts_.options.push_queue_pages),
             static_cast<size_t>(parts_.options.push_batch_pages), parts_.options.pushes_max,
             parts_.options.push_deadline, parts_.options.push_attempts, parts_.options.push_retry},
            peers_, runs_, sessions_, parts_.keyspaces, parts_.clock, metrics_),
        drain_(parts_.store, parts_.keyspaces, pusher_, parts_.clock),
        reoffer_({parts_.store, parts_.keyspaces, peers_, runs_, pusher_,
                  static_cast<size_t>(parts_.options.replicas),
                  parts_.options.reoffer_pages_per_second}),
        calls_(MakeCallContext()) {}
  ~RunningCluster() override { Stop(); }

  absl::Status OpenTransport() {
    if (parts_.transport.listen.empty()) return absl::OkStatus();
    CRUMB_ASSIGN_OR_RETURN(transport_, transport::OpenUcxTransport(parts_.transport, &source_,
                                                                   parts_.versions.frames));
    LogInfo("transport: {} at {}", transport_->Describe(), transport_->address());
    const auto test = transport::RunSelfTest(parts_.transport);
    if (test.ok()) {
      LogInfo("transport: self-test at {:.1f} GB/s, sums verified", test->gb_per_s);
    } else {
      LogWarning("transport: self-test failed, so peers may not be served: {}",
                 test.status().ToString());
    }
    return absl::OkStatus();
  }

  absl::Status Join(const std::string& address) override {
    FillSelf(address);
    parts_.keyspaces.OnChange([this](const KeyspaceId&) {
      const bool reread = merger_.TakeLeftOut();
      MutexLock lock(&mutex_);
      if (membership_ == nullptr) return;
      membership_->KeyspacesChanged();
      // A keyspace that was opened here may be one whose record was left out, with its drops.
      if (reread) membership_->RereadKeyspaces();
    });
    // Until the membership has received the drops of other nodes.
    parts_.keyspaces.Withhold(Withholding::kRecovered);
    InstallView({});
    auto membership = MakeMembership();
    Membership* const joined = membership.get();
    {
      MutexLock lock(&mutex_);
      membership_ = std::move(membership);
    }
    ScheduleReap();
    if (!joined->WaitSynced(parts_.options.start_deadline)) {
      LogWarning("no other node sent its drops within cluster.start_deadline: {}",
                 parts_.keyspaces.withheld() == Withholding::kNothing
                     ? "serving what is here"
                     : "pages of keyspaces from before the start are withheld until one has");
    }
    const v1::NodeRecord self = Self();
    LogInfo("cluster '{}': node {} at {}, {} nodes in view {}", self.cluster(), self.id(),
            self.grpc_address(), peers_.history().views().current->nodes.size(),
            peers_.history().views().current->epoch);
    return absl::OkStatus();
  }

  void Stop() override {
    if (std::exchange(stopped_, true)) return;
    parts_.keyspaces.OnChange(nullptr);
    drain_.Stop();
    reoffer_.Stop();
    std::unique_ptr<Membership> membership;
    {
      MutexLock lock(&mutex_);
      membership.swap(membership_);
    }
    if (membership != nullptr) membership->Stop();
    hellos_->Stop();
    calls_in_progress_->Stop();
    if (transport_ != nullptr) transport_->Stop();
    pusher_.Stop();
    steps_.Stop();
    blocking_.Stop();
    peers_.SetPeers({});
  }

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
  PullContext MakePullContext() {
    return {.store = parts_.store,
            .peers = peers_,
            .flights = flights_,
            .timer = timer_,
            .steps = steps_,
            .clock = parts_.clock,
            .metrics = metrics_,
            .fetch_pages_max = static_cast<size_t>(parts_.transport.fetch_pages_max),
            .newer_generation =
                [this](const std::string&) {
                  MutexLock lock(&mutex_);
                  if (membership_ != nullptr) membership_->RequestKeyspaces();
                },
            .holders = &holders_,
            .pulled = [this](const FragmentHeader& header,
                             const PageKey& run) { pusher_.OfferCopy(header, run); }};
  }

  PeerCallContext MakeCallContext() {
    return {.clock = parts_.clock,
            .store = parts_.store,
            .keyspaces = parts_.keyspaces,
            .peers = peers_,
            .sessions = sessions_,
            .leases = leases_,
            .reader = reader_,
            .push_pages = push_pages_,
            .holders = holders_,
            .metrics = metrics_,
            .push_policy = parts_.options.push_policy(),
            .push_deadline = parts_.options.push_deadline,
            .keys_max = parts_.keys_max,
            .record_page_bytes = kRecordPageBytes,
            .self = [this] { return Self(); },
            .merge =
                [this](std::vector<v1::KeyspaceEntry> entries,
                       const std::function<void(absl::Status)>& done) {
                  auto shared =
                      std::make_shared<std::vector<v1::KeyspaceEntry>>(std::move(entries));
                  const bool queued =
                      blocking_.Submit([this, shared, done] { done(merger_.Merge(*shared)); });
                  if (!queued) {
                    done(absl::ResourceExhaustedError("limits.control_queue is reached"));
                  }
                },
            .drain = [this] { return BeginDrain(); }};
  }

  void FillSelf(const std::string& address) {
    const ClusterOptions& options = parts_.options;
    MutexLock lock(&mutex_);
    self_.set_id(parts_.node_id);
    self_.set_weight(options.weight);
    self_.set_grpc_address(options.advertise.empty() ? address : options.advertise);
    if (transport_ != nullptr) self_.set_transport_address(transport_->address());
    self_.set_version(parts_.version);
    self_.set_wire_min(parts_.versions.wire_min);
    self_.set_wire_max(parts_.versions.wire_max);
    self_.set_layout_id(parts_.versions.layout_id);
    self_.set_capacity_bytes(parts_.capacity_bytes);
    self_.set_host(options.host.empty() ? MachineName() : options.host);
    self_.set_zone(options.zone);
    self_.set_state(v1::NODE_STATE_ACTIVE);
    self_.set_incarnation(incarnation_);
    self_.set_cluster(options.name);
  }

  v1::NodeRecord Self() const {
    MutexLock lock(&mutex_);
    return self_;
  }

  std::unique_ptr<Membership> MakeMembership() {
    const ClusterOptions& options = parts_.options;
    Membership::Events events;
    events.nodes = [this](Membership::Nodes nodes) { InstallNodes(std::move(nodes)); };
    events.keyspaces = [this](const Membership::Keyspaces& keyspaces) {
      return merger_.Merge(keyspaces);
    };
    events.own_version = [this] { return parts_.keyspaces.version(); };
    events.own_page = [this](uint64_t after) { return OwnPageAfter(after); };
    events.send_to_peers = [this](Membership::Keyspaces keyspaces,
                                  const std::function<void()>& failed) {
      SendToPeers(std::move(keyspaces), failed);
    };
    events.withhold = [this](Withholding withheld) { parts_.keyspaces.Withhold(withheld); };
    if (!options.etcd.empty()) {
      EtcdMembership::Options etcd;
      etcd.prefix = options.etcd_prefix;
      etcd.node_ttl = options.node_ttl;
      etcd.deletions_max = static_cast<size_t>(options.deletions_max);
      etcd.serve_unsynced = options.serve_unsynced;
      etcd.unsynced_after = options.start_deadline;
      return std::make_unique<EtcdMembership>(
          etcd, Self(), EtcdClient::Make(options.etcd, options.rpc_deadline, options.etcd_access),
          std::move(events), metrics_);
    }
    return std::make_unique<StaticMembership>(
        StaticMembership::Options{.addresses = options.nodes,
                                  .heartbeat = options.heartbeat,
                                  .node_ttl = options.node_ttl,
                                  .rpc_deadline = options.rpc_deadline,
                                  .unsynced_after = options.start_deadline,
                                  .serve_unsynced = options.serve_unsynced,
                                  .channel = channel_},
        Self(), std::move(events), hellos_, parts_.clock, metrics_);
  }

  Membership::OwnPage OwnPageAfter(uint64_t after) const {
    auto page = parts_.keyspaces.RecordsAfter(after, kRecordPageBytes);
    Membership::OwnPage own;
    own.next = page.next;
    for (auto& [id, record] : page.records) {
      v1::KeyspaceEntry& entry = own.keyspaces.emplace_back();
      entry.set_keyspace(std::string(id.view()));
      *entry.mutable_record() = std::move(record);
    }
    return own;
  }

  void SendToPeers(Membership::Keyspaces keyspaces, const std::function<void()>& failed);
  std::shared_ptr<Peer> MakePeer(const v1::NodeRecord& record, size_t nodes);
  void InstallNodes(Membership::Nodes nodes);
  void InstallView(const Membership::Nodes& nodes);
  void LogRefused(const std::vector<std::string>& refused);
  absl::Status BeginDrain();
  void SetState(v1::NodeState state);
  void ScheduleReap() {
    timer_.Schedule(parts_.clock.Now() + kReapInterval, [this] {
      metrics_.peer_leases_reaped.Add(leases_.Reap());
      ScheduleReap();
    });
  }

  const Parts parts_;
  const std::string incarnation_;
  const PeerChannel channel_;
  bool stopped_ = false;
  ClusterMetrics metrics_;
  RecordMerger merger_;

  // In the order in which one uses the other.
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

void RunningCluster::SendToPeers(Membership::Keyspaces keyspaces,
                                 const std::function<void()>& failed) {
  v1::PeerKeyspacesRequest request;
  request.set_paged(true);
  request.set_after(UINT64_MAX);  // their records come by etcd
  for (v1::KeyspaceEntry& entry : keyspaces) *request.add_keyspaces() = std::move(entry);
  for (const auto& peer : peers_.All()) {
    metrics_.record_exchanges.Add();
    peer->Keyspaces(request, parts_.clock.Now() + parts_.options.rpc_deadline,
                    [this, failed](const absl::StatusOr<v1::PeerKeyspacesResponse>& response) {
                      if (response.ok() && !response->refused()) return;
                      metrics_.record_exchange_failures.Add();
                      failed();
                    });
  }
}

// Among so few nodes it is worth a connection that may not be needed.
std::shared_ptr<Peer> RunningCluster::MakePeer(const v1::NodeRecord& record, size_t nodes) {
  const bool ahead = nodes <= static_cast<size_t>(parts_.options.connect_ahead);
  if (ahead && transport_ != nullptr && !record.transport_address().empty()) {
    transport_->Connect(record.transport_address());
  }
  const auto when = ahead ? ConnectWhen::kNow : ConnectWhen::kAtFirstCall;
  return std::make_shared<GrpcPeer>(
      record, Breaker::Options{parts_.options.breaker_failures, parts_.options.breaker_open},
      parts_.clock, CallerInfo{parts_.node_id, incarnation_, parts_.versions.wire_max},
      PeerStub(record.grpc_address(), channel_, when), calls_in_progress_, transport_.get());
}

// On the membership's thread, one at a time.
void RunningCluster::InstallNodes(Membership::Nodes nodes) {
  LogRefused(nodes.refused);
  if (nodes.nodes.size() + 1 > static_cast<size_t>(parts_.options.nodes_max)) {
    LogWarning("{} nodes are alive, cluster.nodes_max allows {}: the rest is left out",
               nodes.nodes.size() + 1, parts_.options.nodes_max);
    nodes.nodes.resize(static_cast<size_t>(parts_.options.nodes_max) - 1);
  }
  PeerTable::Peers peers;
  for (const v1::NodeRecord& record : nodes.nodes) {
    auto known = peers_.Find(record.id());
    if (known != nullptr && known->record().SerializeAsString() == record.SerializeAsString()) {
      peers.push_back(std::move(known));
      continue;
    }
    // Pages that a process held may be lost with it.
    if (known != nullptr && known->record().incarnation() != record.incarnation()) {
      holders_.ForgetNode(record.id());
    }
    peers.push_back(MakePeer(record, nodes.nodes.size()));
  }
  for (const auto& gone : peers_.All()) {
    const bool stays = std::any_of(peers.begin(), peers.end(),
                                   [&](const auto& peer) { return peer->id() == gone->id(); });
    if (stays) continue;
    LogInfo("node {} at {} is gone", gone->id(), gone->record().grpc_address());
    sessions_.Forget(gone->id());
    holders_.ForgetNode(gone->id());
    if (transport_ != nullptr && !gone->record().transport_address().empty()) {
      transport_->Disconnect(gone->record().transport_address());
    }
  }
  peers_.SetPeers(peers);
  InstallView(nodes);
  reoffer_.NodesChanged();
}

void RunningCluster::InstallView(const Membership::Nodes& nodes) {
  std::vector<PlacementNode> homes;
  const auto add = [&homes](const v1::NodeRecord& record) {
    if (record.state() != v1::NODE_STATE_ACTIVE) return;
    homes.push_back({.id = record.id(),
                     .weight = record.weight(),
                     .host = record.host(),
                     .zone = record.zone(),
                     .digest = 0});
  };
  for (const v1::NodeRecord& record : nodes.nodes) add(record);
  // The view without this node has the offers that were made before it joined.
  const v1::NodeRecord self = Self();
  const auto now = peers_.history().views().current;
  const bool alone = std::all_of(now->nodes.begin(), now->nodes.end(),
                                 [&](const PlacementNode& node) { return node.id == self.id(); });
  if (alone && !homes.empty()) peers_.history().Install(nodes.epoch, homes);
  add(self);
  if (!peers_.history().Install(nodes.epoch, std::move(homes))) return;
  pusher_.ViewChanged();
  metrics_.view_changes.Add();
  LogInfo("view {}: {} nodes are homes", nodes.epoch,
          peers_.history().views().current->nodes.size());
}

void RunningCluster::LogRefused(const std::vector<std::string>& refused) {
  std::set<std::string> now(refused.begin(), refused.end());
  MutexLock lock(&mutex_);
  for (const std::string& why : now) {
    if (refused_.contains(why)) continue;
    metrics_.nodes_refused.Add();
    LogError("{}", why);
  }
  refused_ = std::move(now);
}

void RunningCluster::SetState(v1::NodeState state) {
  MutexLock lock(&mutex_);
  self_.set_state(state);
  if (membership_ != nullptr) membership_->Publish(self_);
}

absl::Status RunningCluster::BeginDrain() {
  if (peers_.All().empty()) {
    return absl::FailedPreconditionError("no other node is there to take this one's pages");
  }
  SetState(v1::NODE_STATE_DRAINING);
  pusher_.SetLeaving();
  // The new view leaves this node out. The node installs it itself, since the membership reports
  // only other nodes.
  const auto view = peers_.history().views().current;
  std::vector<PlacementNode> rest = view->nodes;
  std::erase_if(rest, [this](const PlacementNode& node) { return node.id == parts_.node_id; });
  if (peers_.history().Install(view->epoch, std::move(rest))) {
    pusher_.ViewChanged();
    metrics_.view_changes.Add();
  }
  drain_.Start([this] { SetState(v1::NODE_STATE_DRAINED); });
  return absl::OkStatus();
}

void RunningCluster::DrainNode(const std::string& node, std::function<void(absl::Status)> done) {
  if (node == parts_.node_id) return done(BeginDrain());
  const auto peer = peers_.Find(node);
  if (peer == nullptr) return done(absl::NotFoundError("no node has the id " + node));
  peer->Drain(parts_.clock.Now() + parts_.options.rpc_deadline,
              [done = std::move(done)](const absl::StatusOr<v1::PeerDrainResponse>& response) {
                done(response.status());
              });
}

void FillNode(const v1::NodeRecord& record, v1::ListNodesResponse::Node* node) {
  node->set_id(record.id());
  node->set_address(record.grpc_address());
  node->set_version(record.version());
  node->set_weight(record.weight());
  node->set_host(record.host());
  node->set_zone(record.zone());
  node->set_capacity_bytes(record.capacity_bytes());
  node->set_state(record.state() == v1::NODE_STATE_ACTIVE     ? "active"
                  : record.state() == v1::NODE_STATE_DRAINING ? "draining"
                                                              : "drained");
}

void RunningCluster::ListNodes(v1::ListNodesResponse* response) {
  const ViewHistory::Views views = peers_.history().views();
  response->set_view_epoch(views.current->epoch);
  response->set_previous_epoch(views.previous->epoch);
  const v1::NodeRecord own = Self();
  auto* self = response->add_nodes();
  FillNode(own, self);
  self->set_self(true);
  self->set_up(true);
  if (own.state() != v1::NODE_STATE_ACTIVE) self->set_pages_to_push(drain_.pages_left());
  for (const auto& peer : peers_.All()) {
    auto* node = response->add_nodes();
    FillNode(peer->record(), node);
    node->set_up(peer->breaker().state() == Breaker::State::kClosed);
    node->set_transport(peer->transport());
    node->set_breaker(BreakerStateName(peer->breaker().state()));
  }
  MutexLock lock(&mutex_);
  for (const std::string& why : refused_) response->add_refused(why);
  if (membership_ != nullptr) response->set_trouble(membership_->health().trouble);
}

Cluster::Gauges RunningCluster::gauges() const {
  Gauges gauges;
  const auto view = peers_.history().views().current;
  gauges.view_epoch = view->epoch;
  gauges.view_nodes = view->nodes.size();
  gauges.pulls = reader_.active();
  gauges.push_pages = pusher_.pending();
  gauges.directory_pages = holders_.pages();
  gauges.directory_evicted_pages = holders_.evicted();
  gauges.peer_leases = leases_.size();
  for (const auto& peer : peers_.All()) {
    const Breaker::State state = peer->breaker().state();
    gauges.nodes.push_back(
        {peer->id(), state == Breaker::State::kClosed, state, peer->breaker().opened()});
  }
  MutexLock lock(&mutex_);
  gauges.withheld = parts_.keyspaces.withheld() != Withholding::kNothing;
  gauges.withheld_keyspaces = parts_.keyspaces.withheld_keyspaces();
  if (membership_ == nullptr) return gauges;
  const Membership::Health health = membership_->health();
  gauges.etcd = health.state;
  gauges.unsynced_nodes = health.unsynced_nodes;
  return gauges;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Open(Parts parts) {
  CRUMB_ASSIGN_OR_RETURN(const RandomId incarnation, RandomId::Make());
  auto cluster =
      std::make_unique<RunningCluster>(std::move(parts), std::string(incarnation.view()));
  CRUMB_RETURN_IF_ERROR(cluster->OpenTransport());
  return cluster;
}

}  // namespace crumb::server
