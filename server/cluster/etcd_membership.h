// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

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
// watches. While etcd does not answer or is full, what was known last stays in force; nodes whose
// leases ended while it was silent get a moment to register again before they are taken for gone.
class EtcdMembership final : public Membership {
 public:
  struct Options {
    std::string prefix = "/crumb/";
    Duration node_ttl = std::chrono::seconds(10);
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
  // Sleeps until woken or then; false: stopping.
  bool Sleep(Duration most);

  // The watcher.
  void WatchAll();
  absl::Status WatchOnce();
  absl::StatusOr<std::vector<EtcdEntry>> ReadAll(int64_t* revision);
  bool Changed(const std::vector<EtcdEntry>& changes);
  void NoteLoss(const std::vector<EtcdEntry>& entries, int64_t revision);
  void ApplyNodes(const std::vector<EtcdEntry>& entries, bool all, int64_t revision);
  void ApplyKeyspaces(const std::vector<EtcdEntry>& entries);
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
  bool synced_ ABSL_GUARDED_BY(mutex_) = false;
  bool told_ ABSL_GUARDED_BY(mutex_) = false;  // etcd took this node's record, or did not, once
  bool publish_ ABSL_GUARDED_BY(mutex_) = true;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kOk;
  std::string trouble_ ABSL_GUARDED_BY(mutex_);     // while state_ is not kOk
  TimePoint since_ ABSL_GUARDED_BY(mutex_);         // when state_ became what it is
  TimePoint failed_last_ ABSL_GUARDED_BY(mutex_);   // a call of the keeper
  bool forgotten_ ABSL_GUARDED_BY(mutex_) = false;  // keyspaces must be told to etcd anew
  v1::NodeRecord self_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Stored> keyspaces_ ABSL_GUARDED_BY(mutex_);  // by key, as etcd has them

  int64_t lease_ = 0;            // the keeper's
  uint64_t stored_version_ = 0;  // the keeper's: own keyspaces' version that etcd has
  std::map<std::string, v1::NodeRecord> nodes_;  // the watcher's, by key
  bool seen_ = false;                            // the watcher's: nodes_ was filled once
  int64_t revision_ = 0;                         // the watcher's: etcd's newest that was read
  int64_t base_ = 0;  // the watcher's: what makes epochs of revisions, so that they grow
  Thread keeper_;
  Thread watcher_;
};

}  // namespace crumb::server
