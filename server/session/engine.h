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
#include "server/base/random_id.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// All processes of one model replica, and the leases that they hold together. SessionTable makes an
// engine for the first session that names it and ends it with the last; sessions hold it by
// reference count, so calls in progress may still use it after its end. Thread-safe: one mutex
// guards all of its state, and nothing external is called under it.
//
// The life of a lease. The store makes it and ends it; the engine counts its holds.
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
//
// Why holds are counted: the scheduler process of an engine acquires a prefix, and the processes of
// its ranks read it. A rank that joined the lease keeps the pages in place even if the scheduler
// releases them, or dies, before the rank has read them.
class Engine {
 public:
  // `pages_max` and `leases_max` bound the leases of all its sessions together, including Acquires
  // in progress.
  Engine(const RandomId& id, unsigned uid, std::string tenant, uint64_t pages_max,
         size_t leases_max)
      : id_(id),
        uid_(uid),
        tenant_(std::move(tenant)),
        pages_max_(pages_max),
        leases_max_(leases_max) {}

  // Returns the 16 random bytes that all processes of the engine send in their hello.
  const RandomId& id() const { return id_; }
  // Returns the user id that every process of the engine must have; a process of another user with
  // the same engine id is refused.
  unsigned uid() const { return uid_; }
  const std::string& tenant() const { return tenant_; }  // empty if it has none

  // Takes up to `wanted` pages from the budget, for an Acquire, and returns how many; 0 if none are
  // left, if there are too many leases, or if the engine has ended. AddLease must follow.
  uint64_t TakeBudget(uint64_t wanted);

  // Records a lease of `pages` pages that `session` acquired, and returns to the budget the rest of
  // the `taken` pages of TakeBudget. Lease 0 means that nothing was leased. Returns false if the
  // engine has ended; the caller must then end the lease in the store. `held` lives as long as the
  // lease.
  bool AddLease(storage::LeaseId lease, uint64_t pages, uint64_t taken, const RandomId& session,
                std::shared_ptr<const void> held = nullptr);

  // Adds the hold of one more session. Returns false if it is not a lease of this engine.
  bool JoinLease(storage::LeaseId lease);

  // A lease has one hold of the acquirer (kAcquired) and one of each session that joined it
  // (kJoined). Any session of the engine may end the acquirer's hold, except one that had joined
  // and has ended its own hold: a repeated Release of such a session must have no effect.
  enum class Hold { kAcquired, kJoined };
  // kHeldByOthers: other holds remain. kLast: the caller must end the lease in the store. kUnknown:
  // the engine has no such hold.
  enum class Removal { kUnknown, kHeldByOthers, kLast };
  // On kLast, `left` gets the object that AddLease was given with the lease (see Ended).
  Removal RemoveLease(storage::LeaseId lease, Hold hold, const RandomId& session,
                      std::shared_ptr<const void>* left);

  // Leases that the caller must end in the store, and the objects that AddLease was given with
  // them. The destructors of these take time in the number of pages, so the caller runs them
  // without a lock.
  struct Ended {
    std::vector<storage::LeaseId> leases;
    std::vector<std::shared_ptr<const void>> held;
  };

  // Ends the acquirer's hold of the leases that `session` acquired, because its process has exited,
  // and adds those without other holds to `ended`. Without this, a leader that crashes and restarts
  // repeatedly would use up the budget of an engine whose other processes are still running.
  void DropAcquiredBy(const RandomId& session, Ended* ended);

  // Ends the engine and adds its leases to `ended`.
  void End(Ended* ended);

  // Returns the number of leases that the engine holds; Acquires in progress are not counted.
  size_t leases() const;
  // Returns the pages of these leases, with those that Acquires in progress have taken.
  uint64_t pages() const;

 private:
  struct Held {
    // Pages that the lease takes off the engine's budget.
    uint64_t pages = 0;
    uint64_t acquirer = 0;  // slot of the session
    bool acquired = true;   // the acquirer has not released it
    // Number of joins that were not given back, over all sessions.
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
  // Acquires in progress: calls of TakeBudget without their AddLease. They count against
  // leases_max_.
  size_t acquiring_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<storage::LeaseId, Held> leases_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
