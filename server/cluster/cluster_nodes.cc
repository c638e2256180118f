// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The nodes of RunningCluster: peers, views, drains, and reports on them.
#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "server/cluster/node_check.h"
#include "server/cluster/running_cluster.h"
#include "transport/transport.h"

namespace crumb::server {
namespace {

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

}  // namespace

// Connects ahead if there are few nodes, although the connection may not be needed.
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

}  // namespace crumb::server
