// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/roster.h"
#include "common/unique_fd.h"
#include "crumb/v1/session.pb.h"
#include "server/base/owner_tasks.h"
#include "server/base/random_id.h"
#include "server/device/pool_budget.h"
#include "server/device/pool_options.h"
#include "server/metrics/server_metrics.h"
#include "server/session/pool_plane.h"
#include "server/session/session.h"
#include "server/session/session_memory.h"
#include "storage/device/device_tier.h"

namespace crumb::server {

// The device pools of this host: the tenant of each, the descriptors that keep its memory
// allocated, and the processes that are its members. DeviceSlots has their slots and pages. The
// daemon owns it. Thread-safe.
//
// The life of a pool:
//
//   Join of the first process   the pool is added; its budget is taken
//   Offer, Fetch                members add handles (descriptors of device memory) and get those of
//                               other members
//   Leave, or a process ends    the process is no member any more; the pool is idle if it was the
//                               last
//   Join while it is idle       the pool is used again, with its pages
//   GiveUp                      another request needs the room, or the pool was idle for keep_for:
//                               it is taken out of the device tier (Retired), its descriptors are
//                               closed by tasks of its tenant, and then its budget is free
//
// A pool of an earlier crumbd recovers first: its members reclaim their slots, and no slot is
// reserved before every process in its roster has done so (SettleRecovery).
//
// Descriptors come from processes that are not trusted, so no system call is made on one while the
// lock is held: the kind of a handle is checked, and a roster opened and read, before it is taken,
// and both are closed by tasks of their tenant. Pools, descriptors and slots are bounded in total
// and for each tenant (PoolBudget). A request that exceeds a bound first ends idle pools: those of
// its own tenant, and those of other tenants that have been idle for keep_from_others. Since a pool
// counts until its descriptors are closed, the request waits for that, for a bounded time.
//
// Threads: Handle runs on the tasks of processes' users and tenants and may wait there; Check runs
// on the thread of FdListener; the look-ups and Reserve on the threads of calls. mutex_ guards the
// pools and is taken before Ended::mutex and before the lock of the device tier, which calls
// ChooseDemoter and RequestDemotion without its own lock.
class DevicePools final : public SessionMemory, public PoolPlane {
 public:
  // `tier` null: this store has no device tier, and every request is refused. `tier` and `metrics`
  // are borrowed. Sets the tier's demoters, so there is one object for each tier.
  DevicePools(const PoolOptions& options, storage::DeviceTier* tier, const Clock& clock,
              ServerMetrics& metrics);

  // Returns the slots and pages of the pools. REQUIRES: there is a device tier.
  storage::DeviceTier& tier() const { return *tier_; }

  // Returns the pool of that id (16 bytes) if the session takes part in it. kInvalidArgument: it
  // does not, or there is no such pool.
  absl::StatusOr<storage::DevicePoolNumber> Joined(const Session& session,
                                                   std::string_view pool) const;
  // Returns the pool of that id if it belongs to the session's tenant, whether or not the session
  // takes part in it; 0: none.
  storage::DevicePoolNumber OfTenant(const Session& session, std::string_view pool) const;
  // Returns all pools of a tenant, idle ones included.
  std::vector<storage::DevicePoolNumber> AllOf(const std::string& tenant) const;
  // Returns the pools in which any session of the engine takes part.
  std::vector<storage::DevicePoolNumber> OfEngine(const Engine& engine) const;

  // Reserves blank slots for the session. `request` is the call's number, in ascending order; 0 if
  // it has none. A caller repeats a number until it has the response: the last number returns the
  // same slots again, an earlier one returns none. A session that has closed gets none.
  // kUnavailable: the session's last numbered call is still being served, and a concurrent second
  // one would reserve slots that the caller never receives.
  absl::StatusOr<std::vector<uint64_t>> Reserve(const Session& session,
                                                storage::DevicePoolNumber pool, uint64_t request,
                                                size_t count);

  // Releases all slots that the session holds in the pool except `kept`. The process has another
  // session, so this one gets no more slots there, not even from calls in progress. Returns how
  // many were released.
  size_t ReleaseAllBut(const Session& session, storage::DevicePoolNumber pool,
                       std::span<const uint64_t> kept);
  // Whether the session is given nothing more: that was called, or the session has closed. A caller
  // that has just given it slots takes them back.
  bool Sealed(const Session& session, storage::DevicePoolNumber pool) const;

  // Pools that one Acquire may name, and looks into.
  size_t named_max() const { return static_cast<size_t>(options_.named_max); }

  // PoolPlane.
  bool enabled() const override { return tier_ != nullptr && options_.pools_max > 0; }
  // Serves one request; the response of a refusal has a code and a text. kFailedPrecondition: this
  // node keeps no pools; kUnavailable: the session is closed, or the request may be tried again;
  // kResourceExhausted names the setting that is reached; kInvalidArgument: the caller's mistake.
  // Waits up to 2 s for pools to end that make room.
  PoolReply Handle(const std::shared_ptr<Session>& session, const v1::PoolRequest& request,
                   std::vector<UniqueFd> fds) override;
  // Gives up pools that were idle for keep_for, drops members that have left and hold nothing any
  // more, and has rosters of recovering pools read again.
  TimePoint Check() override;

  // SessionMemory.
  // Returns whether the session has a slot in any pool.
  bool Holds(const Session& session) const override;
  // Ends the demotions that the session was to do, because it gets no more requests.
  void CallsEnded(const Session& session) override;
  // Takes the session out of all pools and releases its slots.
  void ProcessEnded(const Session& session) override;

  // Sums for metrics and the status page.
  struct Totals {
    size_t pools = 0;
    size_t idle_pools = 0;  // pools without a member
    uint64_t given_up = 0;  // ever
    // Descriptors of handles and rosters, without those that were closed since the last request.
    uint64_t descriptors = 0;
    uint64_t descriptors_max = 0;
  };
  Totals totals() const;

 private:
  // A session that takes part in a pool, and the state of its numbered Reserves.
  struct Member {
    std::weak_ptr<Session> session;
    const Engine* engine = nullptr;
    bool sealed = false;     // is given no slots any more
    bool reserving = false;  // a numbered Reserve is being served
    uint64_t last_request = 0;
    std::vector<uint64_t> last_slots;
  };
  // A pool. `handles` maps the number of a handle, which is its position in the pool, to its
  // descriptor; numbers may have gaps while the pool recovers.
  struct Pool {
    // Id by which processes name the pool; random, and kept when another crumbd takes over.
    RandomId id;
    // 16 bytes that name the device, as its members sent them.
    std::string device;
    std::string tenant;
    // Bytes of one slot, and of one handle; every handle has the same size.
    uint64_t slot_bytes = 0;
    uint64_t handle_bytes = 0;
    // The memory file in which members leave their marks (see SettleRecovery) and which has the
    // bits of removed pages.
    SharedFd roster;
    std::map<uint32_t, SharedFd> handles;
    std::set<uint32_t> arriving;  // numbers of handles whose slots the tier does not have yet
    std::map<storage::HolderId, Member> members;
    std::set<storage::HolderId> leaving;  // members, until they hold nothing
    std::set<uint64_t> known_marks;       // marks of members, while the pool recovers
    bool recovering = false;
    bool settling = false;  // a task reads its roster
    // The time at which the last member left. Meaningful only without members.
    TimePoint idle_since;
  };
  // A pool's roster, and the bits in it of slots whose pages were removed.
  struct Roster {
    SharedFd file;
    std::optional<SlotMarks> removed;
  };
  using Pools = std::map<storage::DevicePoolNumber, Pool>;
  // A pool that is no pool any more: the rest of its end needs no lock.
  struct Retired {
    Pool pool;
    storage::DeviceSlots::TakenPool taken;
    PoolBudget::Amount amount;
  };
  // Amounts that ended pools took. A task that ends one notes it here, and the next request takes
  // it off the budget. Outlives the object when such a task does not come back from a close.
  struct Ended {
    Mutex mutex;
    CondVar changed;
    uint64_t pools ABSL_GUARDED_BY(mutex) = 0;  // ever
    std::vector<std::pair<std::string, PoolBudget::Amount>> amounts ABSL_GUARDED_BY(mutex);
  };
  // The steps of a request that has to make room.
  struct RoomMaking {
    std::vector<Retired> retired;  // pools that the caller ends without the lock
    bool waits = false;            // there is room once pools have ended that are ending
    uint64_t ended = 0;            // Ended::pools when it was set
    Rejection over = Rejection::kDeviceSlots;  // the bound that has no room yet
  };

  // Returns the number under which the device tier knows the session.
  static storage::HolderId HolderOf(const Session& session) { return session.token().slot(); }
  // Returns whether the request may join the pool: tenant, device and both sizes are equal.
  static bool SameKind(const Pool& pool, const v1::PoolRequest::Join& request,
                       const std::string& tenant);

  // The requests of PoolRequest, one function each. Their errors are those of Handle. Join adds the
  // session to a pool, to the one it names or to the best of its kind, and returns roster and
  // handles. A pool that is not known is added: with the roster of an earlier crumbd, that `fds`
  // has, it recovers.
  absl::Status Join(const std::shared_ptr<Session>& session, const v1::PoolRequest::Join& request,
                    const std::vector<UniqueFd>& fds, PoolReply* reply);
  // Tries once. Another attempt may find the room that this one has made.
  absl::StatusOr<storage::DevicePoolNumber> TryJoin(const std::shared_ptr<Session>& session,
                                                    const v1::PoolRequest::Join& request,
                                                    Roster& roster, PoolReply* reply,
                                                    RoomMaking* room);
  // Adds a handle to the pool. kAlreadyExists: a recovering pool has that one; kAborted: the pool
  // was given up meanwhile.
  absl::Status Offer(const Session& session, const v1::PoolRequest::Offer& request,
                     std::vector<UniqueFd> fds, PoolReply* reply);
  // The pool, and the number of a handle that is about to come. Once, as TryJoin.
  using Expected = std::pair<storage::DevicePoolNumber, uint32_t>;
  absl::StatusOr<Expected> TryOffer(const Session& session, const v1::PoolRequest::Offer& request,
                                    RoomMaking* room);
  // Returns the handles from the number `first` on.
  absl::Status Fetch(const Session& session, const v1::PoolRequest::Fetch& request,
                     PoolReply* reply);
  // Ends the membership as soon as the session has no slot in the pool.
  absl::Status Leave(const Session& session, const v1::PoolRequest::Leave& request);
  // Gives up idle pools of one device until so many bytes are freed, and returns how many.
  absl::Status Reclaim(const Session& session, const v1::PoolRequest::Reclaim& request,
                       PoolReply* reply);

  // Returns the pool of that id, or pools_.end().
  Pools::iterator FindLocked(std::string_view id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the pool of that id if the session takes part in it, else kInvalidArgument.
  absl::StatusOr<Pools::iterator> JoinedLocked(const Session& session, std::string_view id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the pool of the request's kind to join: one with members before an idle one, then the
  // one with most handles; pools_.end() if there is none.
  Pools::iterator BestLocked(const v1::PoolRequest::Join& request, const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `roster` has a file if the pool was an earlier crumbd's; it is consumed if the pool is added.
  absl::StatusOr<Pools::iterator> AddLocked(const v1::PoolRequest::Join& request,
                                            const std::string& tenant, Roster& roster,
                                            RoomMaking* room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the pool to join, and adds it if there is none. kUnavailable: the pool was given up
  // after the request was looked at first.
  absl::StatusOr<Pools::iterator> PoolToJoinLocked(const v1::PoolRequest::Join& request,
                                                   const std::string& tenant, Roster& roster,
                                                   RoomMaking* room)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The number of a handle that is offered. Only a recovering pool accepts a number that the
  // process chooses.
  absl::StatusOr<uint32_t> NumberLocked(const Pool& pool, const v1::PoolRequest::Offer& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the number and the budget of a handle that is about to come.
  absl::StatusOr<uint32_t> ExpectHandleLocked(Pool& pool, const v1::PoolRequest::Offer& request,
                                              RoomMaking* room)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds numbers and descriptors of the handles from `first` on to the reply.
  static void AddHandles(const Pool& pool, uint32_t first, PoolReply* reply);

  // Makes room for `more` of the tenant's by giving up pools. kResourceExhausted: there are none;
  // kUnavailable, with room->waits: there is room once they have ended.
  absl::Status MakeRoomLocked(const std::string& tenant, const PoolBudget::Amount& more,
                              RoomMaking* room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the pools that were given up, on other threads, and waits for one of those that are ending
  // if the request needs it. Returns true if the request is to be tried again; false, once it is
  // `until`, with the refusal counted.
  bool EndAndWait(RoomMaking room, TimePoint until);
  // Subtracts the amounts of pools that have ended from the budget.
  void SettleEndedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts the refusal and returns kResourceExhausted naming the setting.
  absl::Status RefuseLocked(const std::string& tenant, const PoolBudget::Verdict& verdict)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the part of the budget that the pool takes, handles that are arriving included.
  static PoolBudget::Amount AmountOf(const Pool& pool);
  // One more than the largest number of a handle.
  static uint64_t EndOf(const Pool& pool);
  // Pools that no process takes part in and that may be given up for the tenant: its own first,
  // the longest idle first.
  std::vector<storage::DevicePoolNumber> IdleLocked(const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the pool out of the maps and of the device tier; the caller ends it with EndRetired,
  // without the lock. Returns false, and leaves the pool, if a request or lease refers to its
  // pages.
  bool GiveUpLocked(Pools::iterator pool, std::vector<Retired>* retired)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Has tasks of the pools' tenants free their pages and close their descriptors.
  void EndRetired(std::vector<Retired> retired);
  // Erases those of the pool's leaving members that have no slot any more.
  void DropLeavingLocked(storage::DevicePoolNumber number, Pool& pool)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends a membership; the pool is idle if it was the last. Returns false if there is none.
  bool EraseMemberLocked(storage::DevicePoolNumber number, Pool& pool, storage::HolderId holder)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the recovery if every process in the roster has reported its slots. Reads the roster.
  void SettleRecovery(storage::DevicePoolNumber number);

  // The device tier's demoters. ChooseDemoter returns a member whose process can be sent a request
  // to copy pages out of the pool; 0: there is none.
  storage::HolderId ChooseDemoter(storage::DevicePoolNumber pool) const;
  // Queues such a request on the session's stream. Returns false if it cannot be sent.
  bool RequestDemotion(storage::DevicePoolNumber pool, storage::HolderId holder,
                       std::span<const storage::DemotionWork> work) const;

  const PoolOptions options_;
  storage::DeviceTier* const tier_;
  const Clock& clock_;
  ServerMetrics& metrics_;

  mutable Mutex mutex_;
  Pools pools_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, storage::DevicePoolNumber, std::less<>> by_id_ ABSL_GUARDED_BY(mutex_);
  // Pools of each engine, with the number of its sessions in each.
  absl::flat_hash_map<const Engine*, std::map<storage::DevicePoolNumber, size_t>> by_engine_
      ABSL_GUARDED_BY(mutex_);
  PoolBudget budget_ ABSL_GUARDED_BY(mutex_);
  uint64_t given_up_ ABSL_GUARDED_BY(mutex_) = 0;
  const std::shared_ptr<Ended> ended_ = std::make_shared<Ended>();

  OwnerTasks tasks_;  // tasks of tenants; destroyed before the other members
};

}  // namespace crumb::server
