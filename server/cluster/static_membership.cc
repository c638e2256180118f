// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/static_membership.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "fmt/format.h"
#include "server/cluster/grpc_peer.h"
#include "server/cluster/node_check.h"

namespace crumb::server {

StaticMembership::StaticMembership(const Options& options, const v1::NodeRecord& self,
                                   Events events, std::shared_ptr<OutgoingCalls> calls,
                                   const Clock& clock, ClusterMetrics& metrics)
    : options_(options),
      events_(std::move(events)),
      calls_(std::move(calls)),
      clock_(clock),
      metrics_(metrics),
      self_(self),
      started_(clock.Now()) {
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

void StaticMembership::RequestKeyspaces() {
  MutexLock lock(&mutex_);
  for (auto& [address, entry] : entries_) entry.next_hello = TimePoint();
  woken_ = true;
  changed_.NotifyAll();
}

void StaticMembership::RereadKeyspaces() {
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
  return synced_once_;
}

Membership::Health StaticMembership::health() const {
  MutexLock lock(&mutex_);
  return {State::kNone, trouble_, unsynced_};
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
  ThreadState state;
  while (true) {
    SayHellos();
    ExchangeKeyspaces();
    std::vector<Arrived> arrived;
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
    for (const Arrived& one : arrived) TakeOver(one);
    UpdateWithholding(&state);
    ReportNodes(&state);
    MutexLock lock(&mutex_);
    const auto is_in_sync = [this](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const Entry& node = entry.second;
      const bool usable = !node.record.id().empty() && CheckNode(self_, node.record).ok();
      return node.replied && !(usable && node.behind());
    };
    const bool all = std::all_of(entries_.begin(), entries_.end(), is_in_sync);
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
        [this, address = address](const absl::StatusOr<v1::PeerHelloResponse>& response) {
          TakeHello(address, response);
        });
  }
}

void StaticMembership::TakeHello(const std::string& address,
                                 const absl::StatusOr<v1::PeerHelloResponse>& response) {
  MutexLock lock(&mutex_);
  Entry& entry = entries_[address];
  entry.under_way = false;
  const bool first = !std::exchange(entry.replied, true);
  if (!response.ok()) {
    if (first)
      LogInfo("node at {} does not respond yet: {}", address, response.status().ToString());
    woken_ = true;
    changed_.NotifyAll();
    return;
  }
  const bool restarted = entry.record.incarnation() != response->node().incarnation();
  if (restarted) {
    entry.their_seen = 0;
    entry.own_sent = 0;
    entry.failure = absl::OkStatus();
  }
  const bool news = restarted || entry.record.state() != response->node().state() ||
                    response->keyspaces_version() != entry.their_version ||
                    clock_.Now() - entry.last_hello >= options_.node_ttl;
  entry.record = response->node();
  entry.their_version = response->keyspaces_version();
  entry.last_hello = clock_.Now();
  if (entry.behind() && entry.their_seen >= entry.target) {
    entry.target = entry.their_version;
    entry.behind_since = entry.last_hello;
  }
  if (!news) return;
  woken_ = true;
  changed_.NotifyAll();
}

bool StaticMembership::MayExchange(const Entry& entry, TimePoint now) const {
  return !entry.exchanging && now >= entry.next_exchange && IsAlive(entry, now) &&
         CheckNode(self_, entry.record).ok();
}

void StaticMembership::ExchangeKeyspaces() {
  const uint64_t version = events_.own_version();
  const TimePoint now = clock_.Now();
  std::vector<std::string> due;
  {
    MutexLock lock(&mutex_);
    for (auto& [address, entry] : entries_) {
      if (!MayExchange(entry, now) || (!entry.behind() && entry.own_sent >= version)) continue;
      entry.exchanging = true;
      due.push_back(address);
    }
  }
  for (const std::string& address : due) StartExchange(address, now);
}

void StaticMembership::StartExchange(const std::string& address, TimePoint now) {
  std::shared_ptr<v1::PeerService::Stub> stub;
  uint64_t own_sent = 0;
  v1::PeerKeyspacesRequest request;
  Arrived arrived{address, 0, 0, absl::UnknownError("")};
  {
    MutexLock lock(&mutex_);
    const Entry& entry = entries_[address];
    stub = entry.stub;
    own_sent = entry.own_sent;
    arrived.their_version = entry.their_version;
    request.set_after(entry.their_seen);
    v1::PeerCaller& caller = *request.mutable_caller();
    caller.set_node(self_.id());
    caller.set_incarnation(self_.incarnation());
    caller.set_wire_version(std::min(self_.wire_max(), entry.record.wire_max()));
  }
  request.set_paged(true);
  OwnPage own = events_.own_page(own_sent);
  arrived.own_next = own.next;
  for (v1::KeyspaceEntry& entry : own.keyspaces) *request.add_keyspaces() = std::move(entry);
  metrics_.record_exchanges.Add();
  StartCall<v1::PeerKeyspacesResponse>(
      calls_, std::move(request), ToGrpcDeadline(now + options_.rpc_deadline, now),
      [&stub](auto... arguments) { stub->async()->PeerKeyspaces(arguments...); },
      [this, arrived = std::move(arrived)](Exchanged response) mutable {
        arrived.response = std::move(response);
        MutexLock lock(&mutex_);
        arrived_.push_back(std::move(arrived));
        woken_ = true;
        changed_.NotifyAll();
      });
}

// The page counts as taken over once it is in force here, not before.
void StaticMembership::TakeOver(const Arrived& arrived) {
  absl::Status status = arrived.response.status();
  if (status.ok()) {
    const auto& theirs = arrived.response->keyspaces();
    status = events_.keyspaces(Keyspaces(theirs.begin(), theirs.end()));
  }
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  Entry& entry = entries_[arrived.address];
  entry.exchanging = false;
  if (entry.failure.ok()) entry.failed_at = now;
  entry.failure = status;
  if (!status.ok()) {
    metrics_.record_exchange_failures.Add();
    entry.next_exchange = now + options_.heartbeat;
    return;
  }
  const v1::PeerKeyspacesResponse& response = *arrived.response;
  // The process began between hello and exchange: the next hello says so.
  if (response.paged() && response.incarnation() != entry.record.incarnation()) return;
  if (response.refused()) {
    entry.next_exchange = now + options_.heartbeat;
  } else {
    entry.own_sent = arrived.own_next;
  }
  entry.their_seen = response.paged() ? response.next() : arrived.their_version;
  if (entry.their_seen >= entry.target && entry.behind()) {
    entry.target = entry.their_version;
    entry.behind_since = now;
  }
  woken_ = true;  // there may be another page
}

std::optional<std::string> StaticMembership::WhyUnsynced(const std::string& address,
                                                         const Entry& entry, TimePoint now) const {
  if (!IsAlive(entry, now) || !entry.behind() || !CheckNode(self_, entry.record).ok()) {
    return std::nullopt;
  }
  const bool failed = !entry.failure.ok() && entry.last_hello > entry.failed_at;
  const bool late = entry.last_hello - entry.behind_since > options_.unsynced_after;
  if (!failed && !late) return std::nullopt;
  return fmt::format("node {} at {} ({})", entry.record.id(), address,
                     failed ? entry.failure.ToString() : "not all of them in time");
}

void StaticMembership::UpdateWithholding(ThreadState* state) {
  std::string unsynced;
  std::string trouble;
  Withholding withheld = Withholding::kNothing;
  {
    const TimePoint now = clock_.Now();
    MutexLock lock(&mutex_);
    unsynced_ = 0;
    bool alone = true;
    for (const auto& [address, entry] : entries_) {
      const bool usable = !entry.record.id().empty() && CheckNode(self_, entry.record).ok();
      alone &= !entry.record.id().empty() && !usable;
      synced_once_ |= usable && !entry.behind() && entry.their_version > 0;
      const auto why = WhyUnsynced(address, entry, now);
      if (!why) continue;
      ++unsynced_;
      unsynced += (unsynced.empty() ? "" : ", ") + *why;
    }
    synced_once_ |= alone;
    if (!unsynced.empty()) {
      withheld = Withholding::kEverything;
      trouble = "pages are withheld: this node could not take over what was dropped at " + unsynced;
    } else if (!synced_once_ && !options_.serve_unsynced) {
      withheld = Withholding::kRecovered;
      trouble =
          "pages of keyspaces from before the start are withheld: no node of cluster.nodes has "
          "sent since what was dropped meanwhile; start another node, or set "
          "cluster.serve_unsynced";
    }
    trouble_ = trouble;
    // Withheld from the beginning, which is not logged before others have had the time to respond.
    const bool early = !synced_once_ && now - started_ < options_.unsynced_after;
    if (early && unsynced.empty()) return;
  }
  if (state->judged && withheld == state->withheld) return;
  if (withheld != Withholding::kNothing) {
    LogError("{}", trouble);
  } else if (state->judged) {
    LogInfo("the drops of other nodes were received: pages are served again");
  }
  state->judged = true;
  state->withheld = withheld;
  events_.withhold(withheld);
}

void StaticMembership::ReportNodes(ThreadState* state) {
  Nodes nodes;
  std::string report;
  {
    const TimePoint now = clock_.Now();
    MutexLock lock(&mutex_);
    std::vector<v1::NodeRecord> alive;
    for (const auto& [address, entry] : entries_) {
      if (!IsAlive(entry, now)) continue;
      alive.push_back(entry.record);
    }
    nodes.nodes = UsableNodes(self_, alive, &nodes.refused);
    for (const v1::NodeRecord& node : nodes.nodes) report += node.SerializeAsString();
    for (const std::string& refused : nodes.refused) report += refused;
    report += std::to_string(self_.state());
  }
  if (report == state->reported && state->epoch > 0) return;
  state->reported = std::move(report);
  nodes.epoch = ++state->epoch;
  events_.nodes(std::move(nodes));
}

}  // namespace crumb::server
