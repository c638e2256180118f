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
#include "server/keyspaces/keyspace_merge.h"

namespace crumb::server {
namespace {

// A lease is renewed so often within its time.
constexpr int kRenewals = 3;
// Others may write the same keyspace at the same time.
constexpr int kStoreAttempts = 8;
// After etcd was away, nodes may still be registering again: wait so long before believing that
// they are gone.
constexpr auto kReturnGrace = std::chrono::seconds(3);

Membership::State StateOf(const absl::Status& kept) {
  if (kept.ok()) return Membership::State::kOk;
  if (absl::IsResourceExhausted(kept)) return Membership::State::kFull;
  const bool silent =
      absl::IsUnavailable(kept) || absl::IsDeadlineExceeded(kept) || absl::IsCancelled(kept);
  return silent ? Membership::State::kSilent : Membership::State::kRefused;
}

std::string TroubleOf(Membership::State state, const absl::Status& kept) {
  switch (state) {
    case Membership::State::kSilent:
      return fmt::format(
          "etcd does not answer ({}): the last view stays in force, nodes that come or go are not "
          "noticed, what is dropped is sent to the nodes of the view directly",
          kept.ToString());
    case Membership::State::kFull:
      return fmt::format(
          "etcd takes no records ({}): nodes that are registered stay, new ones and what is "
          "dropped "
          "are not told to others; compact and defragment it, raise its quota, then disarm its "
          "alarm",
          kept.ToString());
    case Membership::State::kRefused:
      return fmt::format("etcd does not take this node's records: {}", kept.ToString());
    case Membership::State::kNone:
    case Membership::State::kOk:
      return "";
  }
  return "";
}

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

Membership::Health EtcdMembership::health() const {
  MutexLock lock(&mutex_);
  if (state_ == State::kOk) return {state_, unheard_};
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(Clock::Real().Now() - since_).count();
  const char* const between = unheard_.empty() ? "" : "; ";
  return {state_, fmt::format("for {} s {}{}{}", seconds, trouble_, between, unheard_)};
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
  {
    MutexLock lock(&mutex_);
    if (std::exchange(stopping_, true)) return;
    changed_.NotifyAll();
  }
  keeper_.Join();
  // Leaving at once spares the others the wait for the lease's end. The record under this node's id
  // may be another node's.
  if (lease_ != 0) etcd_->RevokeLease(lease_).IgnoreError();
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
    NoteKept(kept);
    const Duration renewal = options_.node_ttl / kRenewals;
    if (kept.ok()) {
      retry = options_.retry_min;
      more = Sleep(renewal);
      continue;
    }
    TellDirectly();
    // An etcd that takes no records renews leases nevertheless.
    more = Sleep(lease_ != 0 ? std::min(retry, renewal) : retry);
    retry = std::min(retry * 2, options_.retry_max);
  }
}

// Every state is logged once.
void EtcdMembership::NoteKept(const absl::Status& kept) {
  const TimePoint now = Clock::Real().Now();
  const State state = StateOf(kept);
  std::string line;
  if (!kept.ok()) metrics_.etcd_failures.Add();
  {
    MutexLock lock(&mutex_);
    told_ = true;
    changed_.NotifyAll();
    if (!kept.ok()) failed_last_ = now;
    const std::string trouble = TroubleOf(state, kept);
    const bool same = state == state_ && (state != State::kRefused || trouble == trouble_);
    if (stopping_ || same) return;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - since_).count();
    line = kept.ok() ? fmt::format("etcd takes this node's records again, after {} s", seconds)
                     : trouble + "; trying on";
    if (state != state_) since_ = now;
    state_ = state;
    trouble_ = trouble;
  }
  if (kept.ok()) {
    LogInfo("{}", line);
  } else if (state == State::kRefused) {
    LogError("{}", line);
  } else {
    LogWarning("{}", line);
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
  {
    MutexLock lock(&mutex_);
    if (std::exchange(forgotten_, false)) stored_version_ = 0;
  }
  // One record that etcd refuses does not hold up the others.
  absl::Status first;
  uint64_t stored = stored_version_;
  while (stored < events_.own_version()) {
    const OwnPage own = events_.own_page(stored);
    for (const v1::KeyspaceEntry& entry : own.keyspaces) first.Update(StoreKeyspace(entry));
    if (absl::IsUnavailable(first) || absl::IsDeadlineExceeded(first)) return first;
    stored = own.next;
  }
  if (first.ok()) stored_version_ = stored;
  return first;
}

void EtcdMembership::TellDirectly() {
  if (tell_again_->exchange(false)) told_version_ = 0;
  told_version_ = std::max(told_version_, stored_version_);
  while (told_version_ < events_.own_version()) {
    OwnPage own = events_.own_page(told_version_);
    told_version_ = own.next;
    events_.tell_peers(std::move(own.keyspaces), [again = tell_again_] { again->store(true); });
  }
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
    ForgetDeletions(merged, options_.deletions_max);  // etcd takes 1.5 MiB
    CRUMB_ASSIGN_OR_RETURN(const bool written,
                           etcd_->PutIf(key, merged.SerializeAsString(), 0, stored.revision));
    int64_t revision = 0;
    CRUMB_ASSIGN_OR_RETURN(const std::vector<EtcdEntry> now, etcd_->Range(key, &revision));
    MutexLock lock(&mutex_);
    keyspaces_.erase(key);
    for (const EtcdEntry& found : now) {
      Stored& fresh = keyspaces_[key];
      fresh.revision = found.mod_revision;
      if (!fresh.record.ParseFromString(found.value)) fresh.record = v1::KeyspaceRecord();
    }
    if (written) return absl::OkStatus();
  }
  return absl::AbortedError("keyspace " + id.ToHex() + " changes all the time");
}

void EtcdMembership::WatchAll() {
  Duration retry = options_.retry_min;
  bool told = false;  // that it ended, since it last worked
  while (true) {
    const auto began = std::chrono::steady_clock::now();
    absl::Status ended = WatchOnce();
    if (!taken_.ok()) ended = taken_;
    NoteTaken(taken_);
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    const bool worked = std::chrono::steady_clock::now() - began > options_.retry_max;
    if (worked || !told) LogInfo("etcd: the watch ended: {}; trying on", ended.ToString());
    told = true;
    if (worked || absl::IsAborted(ended)) retry = options_.retry_min;
    const auto until = std::chrono::steady_clock::now() + retry;
    retry = std::min(retry * 2, options_.retry_max);
    MutexLock lock(&mutex_);
    while (!stopping_) {
      if (!changed_.WaitUntil(&mutex_, until)) break;
    }
    if (stopping_) return;
  }
}

// Returns the entries that are there once nodes had the time to come back. Wakes the keeper when
// nodes are missing: this one may be among them.
absl::StatusOr<std::vector<EtcdEntry>> EtcdMembership::ReadAll(int64_t* revision) {
  CRUMB_ASSIGN_OR_RETURN(std::vector<EtcdEntry> entries, etcd_->Range(options_.prefix, revision));
  const auto nodes = std::count_if(entries.begin(), entries.end(), [this](const EtcdEntry& entry) {
    return entry.key.starts_with(NodePrefix());
  });
  if (!seen_ || nodes >= static_cast<std::ptrdiff_t>(nodes_.size())) return entries;
  const auto until = std::chrono::steady_clock::now() + kReturnGrace;
  {
    MutexLock lock(&mutex_);
    woken_ = true;
    changed_.NotifyAll();
    while (!stopping_) {
      if (!changed_.WaitUntil(&mutex_, until)) break;
    }
    if (stopping_) return absl::CancelledError("stopped");
  }
  return etcd_->Range(options_.prefix, revision);
}

absl::Status EtcdMembership::WatchOnce() {
  int64_t revision = 0;
  CRUMB_ASSIGN_OR_RETURN(const std::vector<EtcdEntry> entries, ReadAll(&revision));
  NoteLoss(entries, revision);
  revision_ = revision;
  taken_ = ApplyKeyspaces(entries);
  ApplyNodes(entries, /*all=*/true, revision);
  if (taken_.ok()) {
    MutexLock lock(&mutex_);
    synced_ = true;
    changed_.NotifyAll();
  }
  NoteTaken(taken_);
  CRUMB_RETURN_IF_ERROR(taken_);
  return etcd_->Watch(options_.prefix, revision,
                      [this](const std::vector<EtcdEntry>& changes) { return Changed(changes); });
}

// False: leases ended while etcd was silent, or just after; who has one again is read in a while.
bool EtcdMembership::Changed(const std::vector<EtcdEntry>& changes) {
  int64_t last = 0;
  bool gone = false;
  for (const EtcdEntry& entry : changes) {
    if (!entry.key.starts_with(NodePrefix())) continue;
    last = std::max(last, entry.mod_revision);
    gone |= entry.deleted;
  }
  if (gone) {
    MutexLock lock(&mutex_);
    const bool troubled = failed_last_ != TimePoint() &&
                          Clock::Real().Now() - failed_last_ < options_.node_ttl + kReturnGrace;
    if (troubled) return false;
  }
  taken_ = ApplyKeyspaces(changes);
  revision_ = std::max(revision_, last);
  if (last > 0) ApplyNodes(changes, /*all=*/false, last);
  return taken_.ok();
}

// Says so once for each change.
void EtcdMembership::NoteTaken(const absl::Status& taken) {
  std::string unheard;
  Withholding withheld = Withholding::kNothing;
  {
    MutexLock lock(&mutex_);
    const bool early = Clock::Real().Now() - started_ < options_.unheard_after;
    if (stopping_ || (!synced_ && taken.ok() && early)) return;
    if (!taken.ok()) {
      withheld = Withholding::kEverything;
      unheard = "pages are withheld: what etcd tells of keyspaces could not be taken over: " +
                taken.ToString();
    } else if (!synced_ && !options_.serve_unheard) {
      withheld = Withholding::kRecovered;
      unheard =
          "pages of keyspaces from before the start are withheld: etcd has not sent since what was "
          "dropped meanwhile; see to etcd, or set cluster.serve_unheard";
    }
    if (unheard == unheard_ && withheld == withheld_) return;
    unheard_ = unheard;
  }
  if (!unheard.empty()) LogError("{}", unheard);
  withheld_ = withheld;
  events_.withhold(withheld);
}

// Keyspaces are never deleted: where one is missing or older, etcd lost data or was given a backup.
void EtcdMembership::NoteLoss(const std::vector<EtcdEntry>& entries, int64_t revision) {
  if (revision < revision_) base_ += revision_ - revision + 1;
  std::map<std::string, int64_t> there;
  for (const EtcdEntry& entry : entries) there[entry.key] = entry.mod_revision;
  size_t lost = 0;
  {
    MutexLock lock(&mutex_);
    for (const auto& [key, stored] : keyspaces_) {
      const auto found = there.find(key);
      if (found == there.end() || found->second < stored.revision) ++lost;
    }
    if (lost == 0) return;
    keyspaces_.clear();
    forgotten_ = true;
    woken_ = true;
    changed_.NotifyAll();
  }
  LogWarning("etcd has lost {} keyspaces: it is told again what this node knows", lost);
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
  bool listed = false;
  for (const auto& [key, record] : nodes_) {
    alive.push_back(record);
    listed |= record.id() == self.id() && record.incarnation() == self.incarnation();
  }
  if (!listed) {
    MutexLock lock(&mutex_);
    publish_ = true;  // it was removed, or it was never there
  }
  Nodes nodes;
  nodes.epoch = static_cast<uint64_t>(base_ + revision);
  nodes.nodes = UsableNodes(self, alive, &nodes.refused);
  events_.nodes(std::move(nodes));
}

absl::Status EtcdMembership::ApplyKeyspaces(const std::vector<EtcdEntry>& entries) {
  Keyspaces told;
  {
    MutexLock lock(&mutex_);
    for (const EtcdEntry& entry : entries) {
      if (entry.deleted || !entry.key.starts_with(KeyspacePrefix())) continue;
      const auto id = KeyspaceId::FromHex(entry.key.substr(KeyspacePrefix().size()));
      v1::KeyspaceRecord record;
      if (!id.ok()) continue;
      // One that cannot be read is refused where this node knows the keyspace.
      if (!record.ParseFromString(entry.value)) record.Clear();
      Stored& stored = keyspaces_[entry.key];
      if (stored.revision < entry.mod_revision) stored = {record, entry.mod_revision};
      v1::KeyspaceEntry& added = told.emplace_back();
      added.set_keyspace(std::string(id->view()));
      *added.mutable_record() = std::move(record);
    }
  }
  return told.empty() ? absl::OkStatus() : events_.keyspaces(told);
}

}  // namespace crumb::server
