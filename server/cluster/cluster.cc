// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/cluster.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"
#include "server/base/random_id.h"
#include "server/cluster/etcd_membership.h"
#include "server/cluster/running_cluster.h"
#include "server/cluster/static_membership.h"
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

}  // namespace

RunningCluster::RunningCluster(Parts parts, std::string incarnation)
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

absl::Status RunningCluster::OpenTransport() {
  if (parts_.transport.listen.empty()) return absl::OkStatus();
  CRUMB_ASSIGN_OR_RETURN(
      transport_, transport::OpenUcxTransport(parts_.transport, &source_, parts_.versions.frames));
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

absl::Status RunningCluster::Join(const std::string& address) {
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

void RunningCluster::Stop() {
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

void RunningCluster::ScheduleReap() {
  timer_.Schedule(parts_.clock.Now() + kReapInterval, [this] {
    metrics_.peer_leases_reaped.Add(leases_.Reap());
    ScheduleReap();
  });
}

PullContext RunningCluster::MakePullContext() {
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

PeerCallContext RunningCluster::MakeCallContext() {
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
                auto shared = std::make_shared<std::vector<v1::KeyspaceEntry>>(std::move(entries));
                const bool queued =
                    blocking_.Submit([this, shared, done] { done(merger_.Merge(*shared)); });
                if (!queued) {
                  done(absl::ResourceExhaustedError("limits.control_queue is reached"));
                }
              },
          .drain = [this] { return BeginDrain(); }};
}

void RunningCluster::FillSelf(const std::string& address) {
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

std::unique_ptr<Membership> RunningCluster::MakeMembership() {
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

Membership::OwnPage RunningCluster::OwnPageAfter(uint64_t after) const {
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

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Open(Parts parts) {
  CRUMB_ASSIGN_OR_RETURN(const RandomId incarnation, RandomId::Make());
  auto cluster =
      std::make_unique<RunningCluster>(std::move(parts), std::string(incarnation.view()));
  CRUMB_RETURN_IF_ERROR(cluster->OpenTransport());
  return cluster;
}

}  // namespace crumb::server
