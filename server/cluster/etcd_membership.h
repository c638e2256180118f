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
// with it, a keyspace's under <prefix>keyspaces/<id> stays. One thread keeps lease and records, one
// watches. While etcd does not answer or is full, what was known last stays in force, and changes
// of this node's records are sent to the other nodes of the view directly; nodes whose leases ended
// while it was silent get a moment to register again before they are taken for gone.
//
// Pages are withheld (Events::withhold) until etcd's records were read once and taken over, and
// again while a change that the watch brought could not be taken over.
class EtcdMembership final : public Membership {
 public:
  struct Options {
    std::string prefix = "/crumb/";
    Duration node_ttl = std::chrono::seconds(10);
    size_t deletions_max = 4096;  // keys that the deletions of a stored record list
    // Whether to serve when etcd has told nothing for `unheard_after` since the start.
    bool serve_unheard = false;
    Duration unheard_after = std::chrono::seconds(5);
    Duration retry_min = std::chrono::milliseconds(100);  // doubles up to _max
    Duration retry_max = std::chrono::seconds(5);
  };

  // Starts at once. `metrics` must outlive this.
  EtcdMembership(const Options& options, const v1::NodeRecord& self,
                 std::unique_ptr<EtcdClient> etcd, Events events, ClusterMetrics& metrics);
  ~EtcdMembership() override { Stop(); }

  void Publish(const v1::NodeRecord& self) override;
  void KeyspacesChanged() override;
  void AskKeyspaces() override {}  // the watch tells
  bool WaitSynced(Duration most) override;
  Health health() const override;
  void Stop() override;

 private:
  struct Stored {
    v1::KeyspaceRecord record;
    int64_t revision = 0;
  };

  // The keeper.
  void Keep();
  absl::Status KeepOnce();
  void NoteKept(const absl::Status& kept);
  absl::Status Register(const v1::NodeRecord& self);
  absl::Status StoreKeyspaces();
  absl::Status StoreKeyspace(const v1::KeyspaceEntry& entry);
  // Sends other nodes what etcd does not take.
  void TellDirectly();
  // Sleeps until woken or then; false: stopping.
  bool Sleep(Duration most);

  // The watcher.
  void WatchAll();
  absl::Status WatchOnce();
  absl::StatusOr<std::vector<EtcdEntry>> ReadAll(int64_t* revision);
  bool Changed(const std::vector<EtcdEntry>& changes);
  void NoteLoss(const std::vector<EtcdEntry>& entries, int64_t revision);
  void ApplyNodes(const std::vector<EtcdEntry>& entries, bool all, int64_t revision);
  absl::Status ApplyKeyspaces(const std::vector<EtcdEntry>& entries);
  // Notes whether etcd's records are in force here; not OK: why they are not.
  void NoteTaken(const absl::Status& taken);
  void TellNodes(int64_t revision);

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
  bool synced_ ABSL_GUARDED_BY(mutex_) = false;  // etcd's records were taken over once
  std::string unheard_ ABSL_GUARDED_BY(mutex_);  // why pages are withheld; empty: they are not
  bool told_ ABSL_GUARDED_BY(mutex_) = false;    // etcd took this node's record, or did not, once
  bool publish_ ABSL_GUARDED_BY(mutex_) = true;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kOk;
  std::string trouble_ ABSL_GUARDED_BY(mutex_);     // while state_ is not kOk
  TimePoint since_ ABSL_GUARDED_BY(mutex_);         // when state_ became what it is
  TimePoint failed_last_ ABSL_GUARDED_BY(mutex_);   // a call of the keeper
  bool forgotten_ ABSL_GUARDED_BY(mutex_) = false;  // keyspaces must be written to etcd again
  v1::NodeRecord self_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Stored> keyspaces_ ABSL_GUARDED_BY(mutex_);  // by key, as etcd has them

  int64_t lease_ = 0;            // the keeper's
  uint64_t stored_version_ = 0;  // the keeper's: own change up to which etcd has the records
  uint64_t told_version_ = 0;    // the keeper's: and up to which other nodes were sent them
  // A node did not take what was sent to it directly. Shared with calls under way.
  const std::shared_ptr<std::atomic<bool>> tell_again_ = std::make_shared<std::atomic<bool>>(false);
  const TimePoint started_ = Clock::Real().Now();
  // The watcher's: what was passed to `events_.withhold` last.
  Withholding withheld_ = Withholding::kRecovered;
  absl::Status taken_;                           // the watcher's: of the latest changes
  std::map<std::string, v1::NodeRecord> nodes_;  // the watcher's, by key
  bool seen_ = false;                            // the watcher's: nodes_ was filled once
  int64_t revision_ = 0;                         // the watcher's: etcd's newest that was read
  int64_t base_ = 0;  // the watcher's: what makes epochs of revisions, so that they grow
  Thread keeper_;
  Thread watcher_;
};

}  // namespace crumb::server
