// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "common/random_id.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// All processes of one model replica, and the leases they hold together. Thread-safe.
//
// The life of a lease. The store makes it and ends it; the engine counts who holds it.
//
//   TakeBudget        pages are taken off the engine's budget, for an Acquire that is in progress
//        |
//     AddLease        held by the session that acquired it; the budget keeps the leased pages only
//        |            (returns false if the engine has ended: the caller ends the lease at once)
//     JoinLease       held by one more session, once for each call; any session of the engine
//        |
//   RemoveLease       gives one hold back: the acquirer's, or the calling session's own
//        |            DropAcquiredBy gives back the acquirer's when its process is gone
//     no hold left    the caller ends the lease in the store, which may reuse the slots
//
// End gives back every hold, when the engine's last session is gone. A session that has left
// (`Held::left`) cannot give back the acquirer's hold.
class Engine {
 public:
  Engine(const RandomId& id, unsigned uid, std::string tenant, uint64_t pages_max,
         size_t leases_max)
      : id_(id),
        uid_(uid),
        tenant_(std::move(tenant)),
        pages_max_(pages_max),
        leases_max_(leases_max) {}

  const RandomId& id() const { return id_; }
  unsigned uid() const { return uid_; }
  const std::string& tenant() const { return tenant_; }  // empty: none

  // Takes up to `wanted` pages off the budget and returns how many; 0 when none are left, when
  // there are too many leases, or when the engine has ended. Ended by AddLease.
  uint64_t TakeBudget(uint64_t wanted);

  // Notes a lease of `pages` pages that `session` acquired, of `taken` taken before, and returns
  // the rest to the budget. lease 0: nothing was leased. False: the engine has ended meanwhile, and
  // the caller must end the lease in the store. `held` is kept as long as the lease is.
  bool AddLease(storage::LeaseId lease, uint64_t pages, uint64_t taken, const RandomId& session,
                std::shared_ptr<const void> held = nullptr);

  // One more session holds the lease. False: not a lease of this engine.
  bool JoinLease(storage::LeaseId lease);

  // A lease is held by who acquired it and by every session that joined it. Any session of the
  // engine may let the first hold go, but none that had joined: it has let its own go before.
  enum class Hold { kAcquired, kJoined };
  // kLast: the caller must end the lease in the store. kUnknown: not such a hold of this engine's.
  enum class Removal { kUnknown, kHeldByOthers, kLast };
  // `left` gets what the last hold kept (see Ended).
  Removal RemoveLease(storage::LeaseId lease, Hold hold, const RandomId& session,
                      std::shared_ptr<const void>* left);

  // Leases that the caller must end in the store, and what was kept with them: its destructors take
  // time in the number of pages, so the caller runs them without a lock.
  struct Ended {
    std::vector<storage::LeaseId> leases;
    std::vector<std::shared_ptr<const void>> held;
  };

  // The process of `session` is gone: the leases that it acquired are held by the sessions that
  // joined them alone. Adds those that no session holds to `ended`. Without this, a leader that
  // crashes and comes back would use up the budget of an engine whose other processes live on.
  void DropAcquiredBy(const RandomId& session, Ended* ended);

  // Ends the engine and adds its leases to `ended`.
  void End(Ended* ended);

  size_t leases() const;
  uint64_t pages() const;

 private:
  struct Held {
    uint64_t pages = 0;
    uint64_t acquirer = 0;  // slot of the session
    bool acquired = true;   // who acquired it has not released it
    uint64_t joined = 0;
    std::set<uint64_t> left;           // slots of sessions that had joined
    std::shared_ptr<const void> held;  // budget that the lease's pages take
  };

  const RandomId id_;
  const unsigned uid_;
  const std::string tenant_;
  const uint64_t pages_max_;
  const size_t leases_max_;

  mutable Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t pages_ ABSL_GUARDED_BY(mutex_) = 0;  // leased, or taken for an Acquire in progress
  size_t acquiring_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<storage::LeaseId, Held> leases_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
