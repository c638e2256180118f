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
// After etcd was away, nodes may still be registering again: wait for so long before they
// count as gone.
constexpr auto kReturnGrace = std::chrono::seconds(3);

Membership::State StateOf(const absl::Status& renewed) {
  if (renewed.ok()) return Membership::State::kOk;
  if (absl::IsResourceExhausted(renewed)) return Membership::State::kFull;
  const bool silent = absl::IsUnavailable(renewed) || absl::IsDeadlineExceeded(renewed) ||
                      absl::IsCancelled(renewed);
  return silent ? Membership::State::kSilent : Membership::State::kRefused;
}

std::string TroubleOf(Membership::State state, const absl::Status& renewed) {
  switch (state) {
    case Membership::State::kSilent:
      return fmt::format(
          "etcd does not respond ({}): the last view stays in force, nodes that come or go are not "
          "noticed, what is dropped is sent to the nodes of the view directly",
          renewed.ToString());
    case Membership::State::kFull:
      return fmt::format(
          "etcd takes no records ({}): nodes that are registered stay, new ones and what is "
          "dropped "
          "do not reach others; compact and defragment it, raise its quota, then disarm its "
          "alarm",
          renewed.ToString());
    case Membership::State::kRefused:
      return fmt::format("etcd does not take this node's records: {}", renewed.ToString());
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
  lease_thread_ = Thread("crumb-members", [this] { RenewAll(); });
  watch_thread_ = Thread("crumb-watch", [this] { WatchAll(); });
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
  if (state_ == State::kOk) return {state_, unsynced_};
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(Clock::Real().Now() - since_).count();
  const char* const between = unsynced_.empty() ? "" : "; ";
  return {state_, fmt::format("for {} s {}{}{}", seconds, trouble_, between, unsynced_)};
}

bool EtcdMembership::WaitSynced(Duration most) {
  const auto deadline = std::chrono::steady_clock::now() + most;
  MutexLock lock(&mutex_);
  while (!(synced_ && attempted_) && !stopping_) {
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
  lease_thread_.Join();
  etcd_->Cancel();
  watch_thread_.Join();
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

void EtcdMembership::RenewAll() {
  LeaseState state;
  Duration retry = options_.retry_min;
  bool more = true;
  while (more) {
    const absl::Status renewed = RenewOnce(&state);
    NoteRenewal(renewed);
    const Duration renewal = options_.node_ttl / kRenewals;
    if (renewed.ok()) {
      retry = options_.retry_min;
      more = Sleep(renewal);
      continue;
    }
    SendDirectly(&state);
    // An etcd that takes no records renews leases nevertheless.
    more = Sleep(state.lease != 0 ? std::min(retry, renewal) : retry);
    retry = std::min(retry * 2, options_.retry_max);
  }
  // Leaving at once spares the others the wait for the lease's end. The record under this node's id
  // may be another node's.
  if (state.lease != 0) etcd_->RevokeLease(state.lease).IgnoreError();
}

void EtcdMembership::NoteRenewal(const absl::Status& renewed) {
  const TimePoint now = Clock::Real().Now();
  const State state = StateOf(renewed);
  std::string line;
  if (!renewed.ok()) metrics_.etcd_failures.Add();
  {
    MutexLock lock(&mutex_);
    attempted_ = true;
    changed_.NotifyAll();
    if (!renewed.ok()) failed_last_ = now;
    const std::string trouble = TroubleOf(state, renewed);
    const bool same = state == state_ && (state != State::kRefused || trouble == trouble_);
    if (stopping_ || same) return;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - since_).count();
    line = renewed.ok() ? fmt::format("etcd takes this node's records again, after {} s", seconds)
                        : trouble + "; trying on";
    if (state != state_) since_ = now;
    state_ = state;
    trouble_ = trouble;
  }
  if (renewed.ok()) {
    LogInfo("{}", line);
  } else if (state == State::kRefused) {
    LogError("{}", line);
  } else {
    LogWarning("{}", line);
  }
}

absl::Status EtcdMembership::RenewOnce(LeaseState* state) {
  v1::NodeRecord self;
  bool publish = false;
  {
    MutexLock lock(&mutex_);
    self = self_;
    publish = publish_;
  }
  if (state->lease != 0) {
    absl::Status alive = etcd_->KeepAlive(state->lease);
    if (absl::IsNotFound(alive)) state->lease = 0;
    if (!alive.ok() && state->lease != 0) return alive;
  }
  if (state->lease == 0) {
    CRUMB_ASSIGN_OR_RETURN(state->lease, etcd_->GrantLease(options_.node_ttl));
    publish = true;
  }
  if (publish) {
    {
      MutexLock lock(&mutex_);
      publish_ = true;  // tried again until it has succeeded
    }
    CRUMB_RETURN_IF_ERROR(Register(self, state->lease));
    MutexLock lock(&mutex_);
    publish_ = self_.SerializeAsString() != self.SerializeAsString();
  }
  return StoreKeyspaces(state);
}

// A record of another process under this id is either this node's earlier life, whose address is
// the same, or another node that was given a copy of the data folder.
absl::Status EtcdMembership::Register(const v1::NodeRecord& self, int64_t lease) {
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
                         etcd_->PutIf(key, self.SerializeAsString(), lease, mod_revision));
  if (!written) return absl::AbortedError("the node's record changed meanwhile");
  return absl::OkStatus();
}

absl::Status EtcdMembership::StoreKeyspaces(LeaseState* state) {
  {
    MutexLock lock(&mutex_);
    if (std::exchange(forgotten_, false)) state->stored_version = 0;
  }
  // One record that etcd refuses does not hold up the others.
  absl::Status first;
  uint64_t stored = state->stored_version;
  while (stored < events_.own_version()) {
    const OwnPage own = events_.own_page(stored);
    for (const v1::KeyspaceEntry& entry : own.keyspaces) first.Update(StoreKeyspace(entry));
    if (absl::IsUnavailable(first) || absl::IsDeadlineExceeded(first)) return first;
    stored = own.next;
  }
  if (first.ok()) state->stored_version = stored;
  return first;
}

void EtcdMembership::SendDirectly(LeaseState* state) {
  if (resend_->exchange(false)) state->sent_version = 0;
  state->sent_version = std::max(state->sent_version, state->stored_version);
  while (state->sent_version < events_.own_version()) {
    OwnPage own = events_.own_page(state->sent_version);
    state->sent_version = own.next;
    events_.send_to_peers(std::move(own.keyspaces), [again = resend_] { again->store(true); });
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
  WatchState state;
  bool logged = false;  // its end was logged since it last worked
  while (true) {
    const auto began = std::chrono::steady_clock::now();
    absl::Status ended = WatchOnce(&state);
    if (!state.taken.ok()) ended = state.taken;
    NoteTaken(&state);
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    const bool worked = std::chrono::steady_clock::now() - began > options_.retry_max;
    if (worked || !logged) LogInfo("etcd: the watch ended: {}; trying on", ended.ToString());
    logged = true;
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

absl::StatusOr<std::vector<EtcdEntry>> EtcdMembership::ReadAll(const WatchState& state,
                                                               int64_t* revision) {
  CRUMB_ASSIGN_OR_RETURN(std::vector<EtcdEntry> entries, etcd_->Range(options_.prefix, revision));
  const auto nodes = std::count_if(entries.begin(), entries.end(), [this](const EtcdEntry& entry) {
    return entry.key.starts_with(NodePrefix());
  });
  if (!state.seen || nodes >= static_cast<std::ptrdiff_t>(state.nodes.size())) return entries;
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

absl::Status EtcdMembership::WatchOnce(WatchState* state) {
  int64_t revision = 0;
  CRUMB_ASSIGN_OR_RETURN(const std::vector<EtcdEntry> entries, ReadAll(*state, &revision));
  NoteLoss(entries, revision, state);
  state->revision = revision;
  state->taken = ApplyKeyspaces(entries);
  ApplyNodes(entries, /*all=*/true, revision, state);
  if (state->taken.ok()) {
    MutexLock lock(&mutex_);
    synced_ = true;
    changed_.NotifyAll();
  }
  NoteTaken(state);
  CRUMB_RETURN_IF_ERROR(state->taken);
  return etcd_->Watch(
      options_.prefix, revision,
      [this, state](const std::vector<EtcdEntry>& changes) { return Changed(changes, state); });
}

bool EtcdMembership::Changed(const std::vector<EtcdEntry>& changes, WatchState* state) {
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
  state->taken = ApplyKeyspaces(changes);
  state->revision = std::max(state->revision, last);
  if (last > 0) ApplyNodes(changes, /*all=*/false, last, state);
  return state->taken.ok();
}

void EtcdMembership::NoteTaken(WatchState* state) {
  const absl::Status& taken = state->taken;
  std::string unsynced;
  Withholding withheld = Withholding::kNothing;
  {
    MutexLock lock(&mutex_);
    const bool early = Clock::Real().Now() - started_ < options_.unsynced_after;
    if (stopping_ || (!synced_ && taken.ok() && early)) return;
    if (!taken.ok()) {
      withheld = Withholding::kEverything;
      unsynced = "pages are withheld: etcd's records of keyspaces could not be taken over: " +
                 taken.ToString();
    } else if (!synced_ && !options_.serve_unsynced) {
      withheld = Withholding::kRecovered;
      unsynced =
          "pages of keyspaces from before the start are withheld: etcd has not sent since what was "
          "dropped meanwhile; see to etcd, or set cluster.serve_unsynced";
    }
    if (unsynced == unsynced_ && withheld == state->withheld) return;
    unsynced_ = unsynced;
  }
  if (!unsynced.empty()) LogError("{}", unsynced);
  state->withheld = withheld;
  events_.withhold(withheld);
}

// A keyspace that is missing or older: etcd lost data or was restored from a backup.
void EtcdMembership::NoteLoss(const std::vector<EtcdEntry>& entries, int64_t revision,
                              WatchState* state) {
  if (revision < state->revision) state->base += state->revision - revision + 1;
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
  LogWarning("etcd has lost {} keyspaces: this node's records are sent to it again", lost);
}

void EtcdMembership::ApplyNodes(const std::vector<EtcdEntry>& entries, bool all, int64_t revision,
                                WatchState* state) {
  if (all) state->nodes.clear();
  for (const EtcdEntry& entry : entries) {
    if (!entry.key.starts_with(NodePrefix())) continue;
    v1::NodeRecord record;
    if (entry.deleted) {
      state->nodes.erase(entry.key);
    } else if (record.ParseFromString(entry.value)) {
      state->nodes[entry.key] = std::move(record);
    } else {
      LogWarning("etcd: {} holds no node record, it is left out", entry.key);
    }
  }
  state->seen = true;
  ReportNodes(*state, revision);
}

void EtcdMembership::ReportNodes(const WatchState& state, int64_t revision) {
  v1::NodeRecord self;
  {
    MutexLock lock(&mutex_);
    self = self_;
  }
  std::vector<v1::NodeRecord> alive;
  bool listed = false;
  for (const auto& [key, record] : state.nodes) {
    alive.push_back(record);
    listed |= record.id() == self.id() && record.incarnation() == self.incarnation();
  }
  if (!listed) {
    MutexLock lock(&mutex_);
    publish_ = true;  // it was removed, or it was never there
  }
  Nodes nodes;
  nodes.epoch = static_cast<uint64_t>(state.base + revision);
  nodes.nodes = UsableNodes(self, alive, &nodes.refused);
  events_.nodes(std::move(nodes));
}

absl::Status EtcdMembership::ApplyKeyspaces(const std::vector<EtcdEntry>& entries) {
  Keyspaces received;
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
      v1::KeyspaceEntry& added = received.emplace_back();
      added.set_keyspace(std::string(id->view()));
      *added.mutable_record() = std::move(record);
    }
  }
  return received.empty() ? absl::OkStatus() : events_.keyspaces(received);
}

}  // namespace crumb::server
