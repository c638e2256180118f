// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/mutex.h"
#include "common/page_key.h"

namespace crumb::storage {

// A Flush reports on one tenant's keyspaces, or, without a value, on all of them.
using FlushScope = std::optional<std::string>;

// Counts lost pages: pages that left host memory before the tier below had them, although their
// writers were promised durability. Losses are counted by tenant, because a tenant's Flush fails
// only for losses of that tenant and must not clear those of another.
//
// A mark is a position in the losses of one scope: the ledger's base plus the number of pages that
// the scope has lost so far. A caller that notes the mark before it commits finds out later how
// many pages were lost since. The base is the wall clock in nanoseconds when the first process of
// a succession started, which is higher than all marks of the processes before. A process that
// takes host memory over also takes the ledger over, so that marks and losses go on.
//
// A caller without a mark receives the losses since the last report to such a caller of its scope.
//
// Thread-safe. The ledger's lock is taken after HostState::mutex, and no other lock is taken while
// it is held.
class LossLedger {
 public:
  struct Losses {
    uint64_t pages = 0;
    uint64_t reported = 0;  // pages that were reported to callers without a mark

    friend bool operator==(const Losses&, const Losses&) = default;
  };
  // The part that a process hands to its successor.
  struct State {
    uint64_t mark_base = 0;
    Losses all;
    std::map<std::string, Losses> tenants;    // those that ever lost a page
    std::map<KeyspaceId, uint64_t> no_owner;  // losses of keyspaces whose tenant is not known yet

    friend bool operator==(const State&, const State&) = default;
  };
  struct Report {
    uint64_t pages = 0;  // lost
    // The mark is not of this succession of processes: pages that were committed since the mark may
    // be lost with the memory of an earlier process.
    bool foreign_mark = false;
    uint64_t mark = 0;  // the mark to pass for the scope's next report
  };
  // A mark of callers that have committed nothing.
  static constexpr uint64_t kNothingCommitted = UINT64_MAX;

  explicit LossLedger(uint64_t mark_base)
      : state_({.mark_base = mark_base, .all = {}, .tenants = {}, .no_owner = {}}) {}

  State state() const {
    MutexLock lock(&mutex_);
    return state_;
  }
  void Restore(State state) {
    MutexLock lock(&mutex_);
    state_ = std::move(state);
  }

  // The keyspace's losses, past ones too, are the tenant's.
  void SetOwner(const KeyspaceId& keyspace, const std::string& tenant);
  // The keyspace has no pages any more. Its losses stay its tenant's.
  void ForgetOwner(const KeyspaceId& keyspace) {
    MutexLock lock(&mutex_);
    owners_.erase(keyspace);
  }
  // Returns the tenant of a keyspace; none if SetOwner was not called for it.
  std::optional<std::string> OwnerOf(const KeyspaceId& keyspace) const;
  std::vector<KeyspaceId> KeyspacesOf(const std::string& tenant) const;

  // A page of the keyspace is lost.
  void Add(const KeyspaceId& keyspace);

  uint64_t total() const {
    MutexLock lock(&mutex_);
    return state_.all.pages;
  }
  uint64_t Mark(const FlushScope& scope) const;
  // The losses of the scope since `since`, or, without a mark, since its last report without one.
  Report ReportSince(const FlushScope& scope, std::optional<uint64_t> since);

 private:
  Losses LossesOf(const FlushScope& scope) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<KeyspaceId, std::string> owners_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
