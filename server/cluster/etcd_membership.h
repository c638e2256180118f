// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "server/cluster/cluster_metrics.h"
#include "server/cluster/etcd/etcd_client.h"
#include "server/cluster/membership.h"

namespace crumb::server {

// Nodes and keyspaces in etcd: a node's record under <prefix>nodes/<id> hangs on a lease and goes
// with it, a keyspace's under <prefix>keyspaces/<id> stays. The lease thread renews the lease and
// writes records, the watch thread reads them. While etcd does not respond or is full, the last
// view stays in force, and changes of this node's records are sent to the other nodes of the view
// directly; nodes whose leases ended while it was silent get a moment to register again before they
// count as gone.
//
// Pages are withheld (Events::withhold) until etcd's records were read once and taken over, and
// again while a change that the watch brought could not be taken over.
class EtcdMembership final : public Membership {
 public:
  struct Options {
    std::string prefix = "/crumb/";
    Duration node_ttl = std::chrono::seconds(10);
    size_t deletions_max = 4096;  // keys that the deletions of a stored record list
    // Whether to serve if etcd's records were not read within `unsynced_after` of the start.
    bool serve_unsynced = false;
    Duration unsynced_after = std::chrono::seconds(5);
    Duration retry_min = std::chrono::milliseconds(100);  // doubles up to _max
    Duration retry_max = std::chrono::seconds(5);
  };

  // Starts at once. `metrics` must outlive this.
  EtcdMembership(const Options& options, const v1::NodeRecord& self,
                 std::unique_ptr<EtcdClient> etcd, Events events, ClusterMetrics& metrics);
  ~EtcdMembership() override { Stop(); }

  void Publish(const v1::NodeRecord& self) override;
  void KeyspacesChanged() override;
  void RequestKeyspaces() override {}  // the watch brings them
  bool WaitSynced(Duration most) override;
  Health health() const override;
  void Stop() override;

 private:
  // A keyspace's record as etcd has it.
  struct Stored {
    v1::KeyspaceRecord record;
    int64_t revision = 0;
  };
  // The state of the lease thread; only its functions have it.
  struct LeaseState {
    int64_t lease = 0;            // 0: none is held
    uint64_t stored_version = 0;  // own change up to which etcd has the records
    uint64_t sent_version = 0;    // own change up to which other nodes were sent them directly
  };
  // The state of the watch thread; only its functions have it.
  struct WatchState {
    // The argument of the latest `events_.withhold`.
    Withholding withheld = Withholding::kRecovered;
    absl::Status taken;                           // status of the latest changes (NoteTaken)
    std::map<std::string, v1::NodeRecord> nodes;  // keyed by etcd's key
    bool seen = false;                            // `nodes` was filled once
    int64_t revision = 0;                         // etcd's newest that was read
    int64_t base = 0;  // added to revisions to make epochs, which must grow when etcd's shrink
  };

  // The lease thread: renews until stopped, then revokes the lease.
  void RenewAll();
  // Renews or grants the lease, registers this node if its record changed, stores keyspaces.
  absl::Status RenewOnce(LeaseState* state);
  // Stores the result of a renewal as the state of etcd and logs each change of it.
  void NoteRenewal(const absl::Status& renewed);
  // Writes this node's record under the lease. kFailedPrecondition: another node has its id;
  // kAborted: the record changed meanwhile.
  absl::Status Register(const v1::NodeRecord& self, int64_t lease);
  // Writes own keyspace records that changed since `state->stored_version`.
  absl::Status StoreKeyspaces(LeaseState* state);
  // Merges one record into etcd's, again while other nodes write it at the same time (kAborted
  // after several attempts).
  absl::Status StoreKeyspace(const v1::KeyspaceEntry& entry);
  // Sends other nodes the records that etcd does not take.
  void SendDirectly(LeaseState* state);
  // Waits until woken, at most for `most`. False: the membership is stopping.
  bool Sleep(Duration most);

  // The watch thread: reads and watches until stopped, with growing pauses after failures.
  void WatchAll();
  // Reads all of etcd's records, takes them over, and then applies changes until the watch ends.
  absl::Status WatchOnce(WatchState* state);
  // Returns all entries below the prefix. If nodes are missing, waits a moment for them to register
  // again first, and wakes the lease thread, because this node may be among them.
  absl::StatusOr<std::vector<EtcdEntry>> ReadAll(const WatchState& state, int64_t* revision);
  // Applies changes that the watch brought. False ends the watch, so that all entries are read
  // again: leases ended while etcd was silent or just after, or a record was not taken over.
  bool Changed(const std::vector<EtcdEntry>& changes, WatchState* state);
  // Has keyspaces written again that etcd lost: they are never deleted there.
  void NoteLoss(const std::vector<EtcdEntry>& entries, int64_t revision, WatchState* state);
  // Updates `state->nodes` (`all`: replaces them) and reports the nodes.
  void ApplyNodes(const std::vector<EtcdEntry>& entries, bool all, int64_t revision,
                  WatchState* state);
  // Takes over keyspace records. Not OK: some are not in force here.
  absl::Status ApplyKeyspaces(const std::vector<EtcdEntry>& entries);
  // Decides by `state->taken` whether pages are withheld; logs and calls `events_.withhold` when
  // that changes.
  void NoteTaken(WatchState* state);
  // Calls `events_.nodes` with the usable nodes. Publishes this node again if it is not listed.
  void ReportNodes(const WatchState& state, int64_t revision);

  std::string NodePrefix() const { return options_.prefix + "nodes/"; }
  std::string KeyspacePrefix() const { return options_.prefix + "keyspaces/"; }

  const Options options_;
  const std::unique_ptr<EtcdClient> etcd_;
  const Events events_;
  ClusterMetrics& metrics_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool synced_ ABSL_GUARDED_BY(mutex_) = false;     // etcd's records were taken over once
  std::string unsynced_ ABSL_GUARDED_BY(mutex_);    // why pages are withheld; empty: they are not
  bool attempted_ ABSL_GUARDED_BY(mutex_) = false;  // a renewal has ended, with success or not
  bool publish_ ABSL_GUARDED_BY(mutex_) = true;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kOk;
  std::string trouble_ ABSL_GUARDED_BY(mutex_);     // message of the failure; empty in kOk
  TimePoint since_ ABSL_GUARDED_BY(mutex_);         // time at which state_ changed
  TimePoint failed_last_ ABSL_GUARDED_BY(mutex_);   // a renewal, or never
  bool forgotten_ ABSL_GUARDED_BY(mutex_) = false;  // keyspaces must be written to etcd again
  v1::NodeRecord self_ ABSL_GUARDED_BY(mutex_);
  // Keyed by etcd's key, as etcd has them.
  std::map<std::string, Stored> keyspaces_ ABSL_GUARDED_BY(mutex_);

  // True if a node did not receive a record that was sent to it directly. Calls in progress share
  // it.
  const std::shared_ptr<std::atomic<bool>> resend_ = std::make_shared<std::atomic<bool>>(false);
  const TimePoint started_ = Clock::Real().Now();
  Thread lease_thread_;  // crumb-members
  Thread watch_thread_;  // crumb-watch
};

}  // namespace crumb::server
