// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/static_membership.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "server/cluster/grpc_peer.h"
#include "server/cluster/node_check.h"

namespace crumb::server {

StaticMembership::StaticMembership(const Options& options, const v1::NodeRecord& self,
                                   Events events, std::shared_ptr<OutgoingCalls> calls,
                                   const Clock& clock)
    : options_(options),
      events_(std::move(events)),
      calls_(std::move(calls)),
      clock_(clock),
      self_(self) {
  for (const std::string& address : options_.addresses) {
    if (address == self.grpc_address()) continue;
    entries_[address].stub = PeerStub(address, options_.channel, ConnectWhen::kAtFirstCall);
  }
  thread_ = Thread("crumb-members", [this] { Run(); });
}

void StaticMembership::Publish(const v1::NodeRecord& self) {
  MutexLock lock(&mutex_);
  self_ = self;
  for (auto& [address, entry] : entries_) entry.next_hello = TimePoint();
  woken_ = true;
  changed_.NotifyAll();
}

void StaticMembership::AskKeyspaces() {
  MutexLock lock(&mutex_);
  for (auto& [address, entry] : entries_) entry.their_seen = 0;
  woken_ = true;
  changed_.NotifyAll();
}

void StaticMembership::Wake() {
  MutexLock lock(&mutex_);
  woken_ = true;
  changed_.NotifyAll();
}

bool StaticMembership::WaitSynced(Duration most) {
  const auto deadline = std::chrono::steady_clock::now() + most;
  MutexLock lock(&mutex_);
  while (!synced_ && !stopping_) {
    if (!changed_.WaitUntil(&mutex_, deadline)) break;
  }
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const auto& entry) { return !entry.second.record.id().empty(); });
}

void StaticMembership::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
  // Their callbacks refer to this.
  calls_->Stop();
}

void StaticMembership::Run() {
  while (true) {
    SayHellos();
    ExchangeKeyspaces();
    std::vector<Keyspaces> arrived;
    {
      MutexLock lock(&mutex_);
      const auto wake_at = std::chrono::steady_clock::now() + options_.heartbeat;
      while (!woken_ && !stopping_) {
        if (!changed_.WaitUntil(&mutex_, wake_at)) break;
      }
      if (stopping_) return;
      woken_ = false;
      arrived.swap(arrived_);
    }
    for (Keyspaces& keyspaces : arrived) events_.keyspaces(std::move(keyspaces));
    TellNodes();
    MutexLock lock(&mutex_);
    const bool all = std::all_of(entries_.begin(), entries_.end(), [](const auto& entry) {
      const Entry& node = entry.second;
      return node.answered && (node.record.id().empty() || node.their_seen >= node.their_version);
    });
    if (all && arrived_.empty() && !synced_) {
      synced_ = true;
      changed_.NotifyAll();
    }
  }
}

void StaticMembership::SayHellos() {
  const TimePoint now = clock_.Now();
  std::vector<std::pair<std::string, std::shared_ptr<v1::PeerService::Stub>>> due;
  v1::PeerHelloRequest request;
  {
    MutexLock lock(&mutex_);
    *request.mutable_node() = self_;
    for (auto& [address, entry] : entries_) {
      if (entry.under_way || now < entry.next_hello) continue;
      entry.under_way = true;
      entry.next_hello = now + options_.heartbeat;
      due.emplace_back(address, entry.stub);
    }
  }
  for (const auto& [address, stub] : due) {
    StartCall<v1::PeerHelloResponse>(
        calls_, request, ToGrpcDeadline(now + options_.rpc_deadline, now),
        [&stub = stub](auto... arguments) { stub->async()->PeerHello(arguments...); },
        [this, address = address](const absl::StatusOr<v1::PeerHelloResponse>& answer) {
          Heard(address, answer);
        });
  }
}

void StaticMembership::Heard(const std::string& address,
                             const absl::StatusOr<v1::PeerHelloResponse>& answer) {
  MutexLock lock(&mutex_);
  Entry& entry = entries_[address];
  entry.under_way = false;
  const bool first = !std::exchange(entry.answered, true);
  if (!answer.ok()) {
    if (first) LogInfo("node at {} does not answer yet: {}", address, answer.status().ToString());
    woken_ = true;
    changed_.NotifyAll();
    return;
  }
  const bool restarted = entry.record.incarnation() != answer->node().incarnation();
  if (restarted) {
    entry.their_seen = 0;
    entry.own_told = 0;
  }
  const bool news = restarted || entry.record.state() != answer->node().state() ||
                    answer->keyspaces_version() != entry.their_version ||
                    clock_.Now() - entry.heard >= options_.node_ttl;
  entry.record = answer->node();
  entry.their_version = answer->keyspaces_version();
  entry.heard = clock_.Now();
  if (!news) return;
  woken_ = true;
  changed_.NotifyAll();
}

void StaticMembership::ExchangeKeyspaces() {
  const auto [version, own] = events_.own_keyspaces();
  const TimePoint now = clock_.Now();
  struct Due {
    std::string address;
    std::shared_ptr<v1::PeerService::Stub> stub;
    uint32_t wire_version = 0;  // the highest that both speak
  };
  std::vector<Due> due;
  v1::PeerKeyspacesRequest request;
  {
    MutexLock lock(&mutex_);
    request.mutable_caller()->set_node(self_.id());
    request.mutable_caller()->set_incarnation(self_.incarnation());
    for (auto& [address, entry] : entries_) {
      if (entry.record.id().empty() || entry.exchanging || !CheckNode(self_, entry.record).ok() ||
          now - entry.heard >= options_.node_ttl) {
        continue;
      }
      if (entry.their_seen >= entry.their_version && entry.own_told >= version) continue;
      entry.exchanging = true;
      due.push_back({address, entry.stub, std::min(self_.wire_max(), entry.record.wire_max())});
    }
  }
  if (due.empty()) return;
  for (const v1::KeyspaceEntry& entry : own) *request.add_keyspaces() = entry;
  for (const auto& [address, stub, wire_version] : due) {
    request.mutable_caller()->set_wire_version(wire_version);
    StartCall<v1::PeerKeyspacesResponse>(
        calls_, request, ToGrpcDeadline(now + options_.rpc_deadline, now),
        [&stub = stub](auto... arguments) { stub->async()->PeerKeyspaces(arguments...); },
        [this, address = address,
         told = version](const absl::StatusOr<v1::PeerKeyspacesResponse>& answer) {
          MutexLock lock(&mutex_);
          Entry& entry = entries_[address];
          entry.exchanging = false;
          if (!answer.ok()) return;
          entry.own_told = told;
          entry.their_seen = entry.their_version;
          arrived_.emplace_back(answer->keyspaces().begin(), answer->keyspaces().end());
          woken_ = true;
          changed_.NotifyAll();
        });
  }
}

void StaticMembership::TellNodes() {
  Nodes nodes;
  std::string told;
  {
    const TimePoint now = clock_.Now();
    MutexLock lock(&mutex_);
    std::vector<v1::NodeRecord> alive;
    for (const auto& [address, entry] : entries_) {
      if (entry.record.id().empty() || now - entry.heard >= options_.node_ttl) continue;
      alive.push_back(entry.record);
    }
    nodes.nodes = UsableNodes(self_, alive, &nodes.refused);
    for (const v1::NodeRecord& node : nodes.nodes) told += node.SerializeAsString();
    for (const std::string& refused : nodes.refused) told += refused;
    told += std::to_string(self_.state());
  }
  if (told == told_ && epoch_ > 0) return;
  told_ = std::move(told);
  nodes.epoch = ++epoch_;
  events_.nodes(std::move(nodes));
}

}  // namespace crumb::server
