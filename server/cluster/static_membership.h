// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "crumb/v1/peer_service.grpc.pb.h"
#include "server/base/outgoing_calls.h"
#include "server/base/tls_credentials.h"
#include "server/cluster/cluster_metrics.h"
#include "server/cluster/membership.h"

namespace crumb::server {

// Membership by a list of addresses: every node calls PeerHello of every other one each heartbeat;
// nodes that respond are alive. Keyspace records travel by PeerKeyspaces, one page each way in a
// call. The response to a hello has the number of the node's latest change; this node is in sync
// with a peer when it has taken over the peer's records up to that number.
//
// Pages are withheld (Events::withhold) while a drop may have been missed:
//   - kRecovered, before the records of any usable node were taken over, unless no node of the list
//     is usable although each has responded (then this node is alone) or `serve_unsynced` is set;
//   - kEverything, while a usable node still responds to hellos, but an exchange with it failed or
//     this node was not in sync with it for `unsynced_after`. A silent node does not count: it is
//     dead or unreachable, and both sides of a partition serve the pages that they hold.
class StaticMembership final : public Membership {
 public:
  struct Options {
    std::vector<std::string> addresses;
    Duration heartbeat = std::chrono::seconds(1);
    Duration node_ttl = std::chrono::seconds(10);
    Duration rpc_deadline = std::chrono::seconds(2);
    Duration unsynced_after = std::chrono::seconds(5);
    bool serve_unsynced = false;
    PeerChannel channel;
  };

  // Starts at once. `clock` and `metrics` must outlive this.
  StaticMembership(const Options& options, const v1::NodeRecord& self, Events events,
                   std::shared_ptr<OutgoingCalls> calls, const Clock& clock,
                   ClusterMetrics& metrics);
  ~StaticMembership() override { Stop(); }

  void Publish(const v1::NodeRecord& self) override;
  void KeyspacesChanged() override { Wake(); }
  void RequestKeyspaces() override;
  void RereadKeyspaces() override;
  bool WaitSynced(Duration most) override;
  Health health() const override;
  void Stop() override;

 private:
  using Exchanged = absl::StatusOr<v1::PeerKeyspacesResponse>;

  struct Entry {
    std::shared_ptr<v1::PeerService::Stub> stub;
    v1::NodeRecord record;  // record without an id as long as the node has not responded
    TimePoint last_hello;   // time of the latest response
    TimePoint next_hello;
    bool under_way = false;  // a hello is
    bool replied = false;    // a hello has ended, with a response or an error

    // Keyspace records.
    bool exchanging = false;  // true until the response was taken over
    TimePoint next_exchange;
    uint64_t their_version = 0;  // their latest change, as their last hello says
    uint64_t their_seen = 0;     // their change up to which this node has taken over
    uint64_t own_sent = 0;       // this node's change up to which they have its records
    uint64_t target = 0;         // `their_version` at the time of `behind_since`
    TimePoint behind_since;      // this node has not reached `target` since
    absl::Status failure;        // failure of the latest exchange
    TimePoint failed_at;  // time of the first of the consecutive failures, if `failure` is not OK
    bool behind() const { return their_seen < their_version; }
  };
  // An exchange's response that waits for the membership's thread.
  struct Arrived {
    std::string address;
    uint64_t their_version = 0;  // version at the time of the request
    uint64_t own_next = 0;
    Exchanged response;
  };

  // The state of the membership's thread; only its functions have it.
  struct ThreadState {
    Withholding withheld = Withholding::kNothing;  // the argument of the latest `withhold`
    bool judged = false;                           // `withhold` was called
    uint64_t epoch = 0;
    std::string reported;  // the arguments of the latest `nodes`, to notice changes
  };

  // Runs on the membership's thread: sends hellos and exchanges on each heartbeat, or when woken,
  // and handles the responses.
  void Run();
  void Wake();
  // Sends the hellos that are due.
  void SayHellos();
  // Stores the response to a hello. Wakes the thread if the node changed.
  void TakeHello(const std::string& address, const absl::StatusOr<v1::PeerHelloResponse>& response);
  // Returns whether the node is usable and no exchange with it is under way or put off.
  bool MayExchange(const Entry& entry, TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts an exchange with each node that has changes for this one, or the reverse.
  void ExchangeKeyspaces();
  // Sends the next page of own records and requests the node's next page.
  void StartExchange(const std::string& address, TimePoint now);
  // Takes over a page of records. Failures put off the next exchange with the node.
  void TakeOver(const Arrived& arrived);
  bool IsAlive(const Entry& entry, TimePoint now) const {
    return !entry.record.id().empty() && now - entry.last_hello < options_.node_ttl;
  }
  // Returns why drops of this node may have been missed; none: they were received.
  std::optional<std::string> WhyUnsynced(const std::string& address, const Entry& entry,
                                         TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Decides whether pages are withheld; logs and calls `events_.withhold` when that changes.
  void UpdateWithholding(ThreadState* state);
  // Calls `events_.nodes` if the usable nodes changed.
  void ReportNodes(ThreadState* state);

  const Options options_;
  const Events events_;
  const std::shared_ptr<OutgoingCalls> calls_;
  const Clock& clock_;
  ClusterMetrics& metrics_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool synced_ ABSL_GUARDED_BY(mutex_) = false;
  bool synced_once_ ABSL_GUARDED_BY(mutex_) = false;  // synced with a node, or this node is alone
  std::string trouble_ ABSL_GUARDED_BY(mutex_);       // why pages are withheld
  size_t unsynced_ ABSL_GUARDED_BY(mutex_) = 0;       // nodes that WhyUnsynced names
  v1::NodeRecord self_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::vector<Arrived> arrived_ ABSL_GUARDED_BY(mutex_);  // one of each entry at most
  const TimePoint started_;
  Thread thread_;
};

}  // namespace crumb::server
