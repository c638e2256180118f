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

// Membership by a list of addresses: every node says hello to every other one each heartbeat; those
// that answer are alive. Keyspace records travel by PeerKeyspaces, one page each way in a call. A
// hello tells the number of a node's latest change; this node has heard of a peer's drops when it
// has taken over the peer's records up to that number.
//
// Pages are withheld (Events::withhold) while a drop may have been missed:
//   - kRecovered, before the records of any usable node were taken over, unless no node of the list
//     is usable although each has answered (then this node is alone) or `serve_unheard` is set;
//   - kEverything, while a usable node goes on answering hellos, and an exchange with it failed, or
//     it was not caught up with for `unheard_after`. A node that answers nothing does not count: it
//     is dead or cut off, and both sides of a partition serve what they hold.
class StaticMembership final : public Membership {
 public:
  struct Options {
    std::vector<std::string> addresses;
    Duration heartbeat = std::chrono::seconds(1);
    Duration node_ttl = std::chrono::seconds(10);
    Duration rpc_deadline = std::chrono::seconds(2);
    Duration unheard_after = std::chrono::seconds(5);
    bool serve_unheard = false;
    PeerChannel channel;
  };

  // Starts at once. `clock` and `metrics` must outlive this.
  StaticMembership(const Options& options, const v1::NodeRecord& self, Events events,
                   std::shared_ptr<OutgoingCalls> calls, const Clock& clock,
                   ClusterMetrics& metrics);
  ~StaticMembership() override { Stop(); }

  void Publish(const v1::NodeRecord& self) override;
  void KeyspacesChanged() override { Wake(); }
  void AskKeyspaces() override;
  void RereadKeyspaces() override;
  bool WaitSynced(Duration most) override;
  Health health() const override;
  void Stop() override;

 private:
  using Exchanged = absl::StatusOr<v1::PeerKeyspacesResponse>;

  struct Entry {
    std::shared_ptr<v1::PeerService::Stub> stub;
    v1::NodeRecord record;  // without id: has not answered yet
    TimePoint heard;        // when it answered last
    TimePoint next_hello;
    bool under_way = false;  // a hello
    bool answered = false;   // or failed, once

    // Keyspace records.
    bool exchanging = false;  // until the answer was taken over
    TimePoint next_exchange;
    uint64_t their_version = 0;  // their latest change, as their last hello says
    uint64_t their_seen = 0;     // their change up to which this node has taken over
    uint64_t own_told = 0;       // this node's change up to which they have
    uint64_t target = 0;         // what `their_version` was at `behind_since`
    TimePoint behind_since;      // this node has not reached `target` since
    absl::Status failure;        // of the latest exchange
    TimePoint failed_at;         // not OK: when the first of the failures in a row was
    bool behind() const { return their_seen < their_version; }
  };
  // An exchange's answer that waits for the membership's thread.
  struct Arrived {
    std::string address;
    uint64_t their_version = 0;  // at the time of the request
    uint64_t own_next = 0;
    Exchanged answer;
  };

  void Run();
  void Wake();
  void SayHellos();
  void Heard(const std::string& address, const absl::StatusOr<v1::PeerHelloResponse>& answer);
  bool MayExchange(const Entry& entry, TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ExchangeKeyspaces();
  void StartExchange(const std::string& address, TimePoint now);
  void TakeOver(const Arrived& arrived);
  bool IsAlive(const Entry& entry, TimePoint now) const {
    return !entry.record.id().empty() && now - entry.heard < options_.node_ttl;
  }
  // Why drops of this node may have been missed; none: they were heard of.
  std::optional<std::string> WhyUnheard(const std::string& address, const Entry& entry,
                                        TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void JudgeHeard();
  void TellNodes();

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
  bool heard_once_ ABSL_GUARDED_BY(mutex_) = false;  // of the drops of some node
  std::string trouble_ ABSL_GUARDED_BY(mutex_);      // why pages are withheld
  size_t unheard_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::NodeRecord self_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::vector<Arrived> arrived_ ABSL_GUARDED_BY(mutex_);  // one of each entry at most
  const TimePoint started_;
  Withholding withheld_ = Withholding::kNothing;  // thread_'s: what was passed to withhold last
  bool judged_ = false;                           // thread_'s: withhold was called
  uint64_t epoch_ = 0;                            // thread_'s
  std::string told_;                              // thread_'s: what was told last
  Thread thread_;
};

}  // namespace crumb::server
