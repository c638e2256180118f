// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/etcd_membership.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "common/page_key.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/cluster/node_check.h"
#include "server/keyspace_merge.h"

namespace crumb::server {
namespace {

// A lease is renewed so often within its time.
constexpr int kRenewals = 3;
// Others may write the same keyspace at the same time.
constexpr int kStoreAttempts = 8;
// After etcd was away, nodes may still be registering again: wait so long before believing that
// they are gone.
constexpr auto kReturnGrace = std::chrono::seconds(3);

}  // namespace

EtcdMembership::EtcdMembership(const Options& options, const v1::NodeRecord& self,
                               std::unique_ptr<EtcdClient> etcd, Events events,
                               ClusterMetrics& metrics)
    : options_(options),
      etcd_(std::move(etcd)),
      events_(std::move(events)),
      metrics_(metrics),
      self_(self) {
  keeper_ = Thread("crumb-members", [this] { Keep(); });
  watcher_ = Thread("crumb-watch", [this] { WatchAll(); });
}

void EtcdMembership::Publish(const v1::NodeRecord& self) {
  MutexLock lock(&mutex_);
  self_ = self;
  publish_ = true;
  woken_ = true;
  changed_.NotifyAll();
}

void EtcdMembership::KeyspacesChanged() {
  MutexLock lock(&mutex_);
  woken_ = true;
  changed_.NotifyAll();
}

bool EtcdMembership::WaitSynced(Duration most) {
  const auto deadline = std::chrono::steady_clock::now() + most;
  MutexLock lock(&mutex_);
  while (!(synced_ && told_) && !stopping_) {
    if (!changed_.WaitUntil(&mutex_, deadline)) break;
  }
  return synced_;
}

void EtcdMembership::Stop() {
  std::string key;
  {
    MutexLock lock(&mutex_);
    if (std::exchange(stopping_, true)) return;
    key = NodePrefix() + self_.id();
    changed_.NotifyAll();
  }
  keeper_.Join();
  // Leaving at once spares the others the wait for the lease's end.
  if (lease_ != 0) etcd_->Delete(key).IgnoreError();
  etcd_->Cancel();
  watcher_.Join();
}

bool EtcdMembership::Sleep(Duration most) {
  const auto until = std::chrono::steady_clock::now() + most;
  MutexLock lock(&mutex_);
  while (!woken_ && !stopping_) {
    if (!changed_.WaitUntil(&mutex_, until)) break;
  }
  woken_ = false;
  return !stopping_;
}

void EtcdMembership::Keep() {
  Duration retry = options_.retry_min;
  bool more = true;
  while (more) {
    const absl::Status kept = KeepOnce();
    {
      MutexLock lock(&mutex_);
      told_ = true;
      changed_.NotifyAll();
    }
    if (kept.ok()) {
      retry = options_.retry_min;
      complained_.clear();
      more = Sleep(options_.node_ttl / kRenewals);
      continue;
    }
    metrics_.etcd_failures.Add();
    if (complained_ != kept.message()) {
      complained_ = std::string(kept.message());
      LogWarning("etcd: {}; the last view stays in force, trying on", kept.ToString());
    }
    more = Sleep(retry);
    retry = std::min(retry * 2, options_.retry_max);
  }
}

absl::Status EtcdMembership::KeepOnce() {
  v1::NodeRecord self;
  bool publish = false;
  {
    MutexLock lock(&mutex_);
    self = self_;
    publish = publish_;
  }
  if (lease_ != 0) {
    const absl::Status alive = etcd_->KeepAlive(lease_);
    if (absl::IsNotFound(alive)) lease_ = 0;
    if (!alive.ok() && lease_ != 0) return alive;
  }
  if (lease_ == 0) {
    CRUMB_ASSIGN_OR_RETURN(lease_, etcd_->GrantLease(options_.node_ttl));
    publish = true;
  }
  if (publish) {
    {
      MutexLock lock(&mutex_);
      publish_ = true;  // until it has worked
    }
    CRUMB_RETURN_IF_ERROR(Register(self));
    MutexLock lock(&mutex_);
    publish_ = self_.SerializeAsString() != self.SerializeAsString();
  }
  return StoreKeyspaces();
}

// A record of another process under this id is either this node's earlier life, whose address is
// the same, or another node that was given a copy of the data folder.
absl::Status EtcdMembership::Register(const v1::NodeRecord& self) {
  const std::string key = NodePrefix() + self.id();
  int64_t revision = 0;
  CRUMB_ASSIGN_OR_RETURN(const std::vector<EtcdEntry> found, etcd_->Range(key, &revision));
  int64_t mod_revision = 0;
  for (const EtcdEntry& entry : found) {
    if (entry.key != key) continue;
    mod_revision = entry.mod_revision;
    v1::NodeRecord other;
    if (!other.ParseFromString(entry.value) || other.incarnation() == self.incarnation() ||
        other.grpc_address() == self.grpc_address()) {
      continue;
    }
    return absl::FailedPreconditionError(
        fmt::format("a node at {} is registered with this node's id {}: one's data folder was "
                    "copied from the other; give it a new one (should it be this node's earlier "
                    "life at another address, its registration ends within {} s)",
                    other.grpc_address(), self.id(),
                    std::chrono::duration_cast<std::chrono::seconds>(options_.node_ttl).count()));
  }
  CRUMB_ASSIGN_OR_RETURN(const bool written,
                         etcd_->PutIf(key, self.SerializeAsString(), lease_, mod_revision));
  if (!written) return absl::AbortedError("the node's record changed meanwhile");
  return absl::OkStatus();
}

absl::Status EtcdMembership::StoreKeyspaces() {
  const auto [version, own] = events_.own_keyspaces();
  if (version == stored_version_) return absl::OkStatus();
  for (const v1::KeyspaceEntry& entry : own) CRUMB_RETURN_IF_ERROR(StoreKeyspace(entry));
  stored_version_ = version;
  return absl::OkStatus();
}

absl::Status EtcdMembership::StoreKeyspace(const v1::KeyspaceEntry& entry) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId id, KeyspaceId::FromBytes(entry.keyspace()));
  const std::string key = KeyspacePrefix() + id.ToHex();
  for (int attempt = 0; attempt < kStoreAttempts; ++attempt) {
    Stored stored;
    {
      MutexLock lock(&mutex_);
      const auto known = keyspaces_.find(key);
      if (known != keyspaces_.end()) stored = known->second;
    }
    v1::KeyspaceRecord merged = stored.revision == 0 ? entry.record() : stored.record;
    if (stored.revision != 0 && !MergeKeyspace(merged, entry.record()).any) {
      return absl::OkStatus();
    }
    CRUMB_ASSIGN_OR_RETURN(const bool written,
                           etcd_->PutIf(key, merged.SerializeAsString(), 0, stored.revision));
    int64_t revision = 0;
    CRUMB_ASSIGN_OR_RETURN(const std::vector<EtcdEntry> now, etcd_->Range(key, &revision));
    MutexLock lock(&mutex_);
    for (const EtcdEntry& found : now) {
      Stored& fresh = keyspaces_[key];
      if (fresh.revision >= found.mod_revision) continue;
      fresh.revision = found.mod_revision;
      if (!fresh.record.ParseFromString(found.value)) fresh.record = v1::KeyspaceRecord();
    }
    if (written) return absl::OkStatus();
  }
  return absl::AbortedError("keyspace " + id.ToHex() + " changes all the time");
}

void EtcdMembership::WatchAll() {
  Duration retry = options_.retry_min;
  while (true) {
    const auto began = std::chrono::steady_clock::now();
    const absl::Status ended = WatchOnce();
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    LogInfo("etcd: the watch ended: {}", ended.ToString());
    if (std::chrono::steady_clock::now() - began > options_.retry_max) retry = options_.retry_min;
    const auto until = std::chrono::steady_clock::now() + retry;
    retry = std::min(retry * 2, options_.retry_max);
    MutexLock lock(&mutex_);
    while (!stopping_) {
      if (!changed_.WaitUntil(&mutex_, until)) break;
    }
    if (stopping_) return;
  }
}

absl::Status EtcdMembership::WatchOnce() {
  int64_t revision = 0;
  CRUMB_ASSIGN_OR_RETURN(std::vector<EtcdEntry> entries, etcd_->Range(options_.prefix, &revision));
  const auto nodes_in = [this](const std::vector<EtcdEntry>& list) {
    return std::count_if(list.begin(), list.end(), [this](const EtcdEntry& entry) {
      return entry.key.starts_with(NodePrefix());
    });
  };
  if (seen_ && nodes_in(entries) < static_cast<std::ptrdiff_t>(nodes_.size())) {
    const auto until = std::chrono::steady_clock::now() + kReturnGrace;
    {
      MutexLock lock(&mutex_);
      while (!stopping_) {
        if (!changed_.WaitUntil(&mutex_, until)) break;
      }
      if (stopping_) return absl::CancelledError("stopped");
    }
    CRUMB_ASSIGN_OR_RETURN(entries, etcd_->Range(options_.prefix, &revision));
  }
  ApplyKeyspaces(entries);
  ApplyNodes(entries, /*all=*/true, revision);
  {
    MutexLock lock(&mutex_);
    synced_ = true;
    changed_.NotifyAll();
  }
  return etcd_->Watch(options_.prefix, revision, [this](const std::vector<EtcdEntry>& changes) {
    ApplyKeyspaces(changes);
    int64_t last = 0;
    for (const EtcdEntry& entry : changes) {
      if (entry.key.starts_with(NodePrefix())) last = std::max(last, entry.mod_revision);
    }
    if (last > 0) ApplyNodes(changes, /*all=*/false, last);
  });
}

void EtcdMembership::ApplyNodes(const std::vector<EtcdEntry>& entries, bool all, int64_t revision) {
  if (all) nodes_.clear();
  for (const EtcdEntry& entry : entries) {
    if (!entry.key.starts_with(NodePrefix())) continue;
    v1::NodeRecord record;
    if (entry.deleted) {
      nodes_.erase(entry.key);
    } else if (record.ParseFromString(entry.value)) {
      nodes_[entry.key] = std::move(record);
    } else {
      LogWarning("etcd: {} holds no node record, it is left out", entry.key);
    }
  }
  seen_ = true;
  TellNodes(revision);
}

void EtcdMembership::TellNodes(int64_t revision) {
  v1::NodeRecord self;
  {
    MutexLock lock(&mutex_);
    self = self_;
  }
  std::vector<v1::NodeRecord> alive;
  for (const auto& [key, record] : nodes_) alive.push_back(record);
  Nodes nodes;
  nodes.epoch = static_cast<uint64_t>(revision);
  nodes.nodes = UsableNodes(self, alive, &nodes.refused);
  events_.nodes(std::move(nodes));
}

void EtcdMembership::ApplyKeyspaces(const std::vector<EtcdEntry>& entries) {
  Keyspaces told;
  {
    MutexLock lock(&mutex_);
    for (const EtcdEntry& entry : entries) {
      if (entry.deleted || !entry.key.starts_with(KeyspacePrefix())) continue;
      const auto id = KeyspaceId::FromHex(entry.key.substr(KeyspacePrefix().size()));
      v1::KeyspaceRecord record;
      if (!id.ok() || !record.ParseFromString(entry.value)) continue;
      Stored& stored = keyspaces_[entry.key];
      if (stored.revision < entry.mod_revision) stored = {record, entry.mod_revision};
      v1::KeyspaceEntry& added = told.emplace_back();
      added.set_keyspace(std::string(id->view()));
      *added.mutable_record() = std::move(record);
    }
  }
  if (!told.empty()) events_.keyspaces(std::move(told));
}

}  // namespace crumb::server
