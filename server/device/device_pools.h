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
// allocated, and the processes that are its members. DeviceSlots has their slots and pages.
// Thread-safe.
//
// The life of a pool:
//
//   Join of the first process   the pool is added; its budget is taken
//   Offer, Fetch                members add handles (descriptors of device memory) and get those of
//                               other members
//   Leave, or a process ends    the process is no member any more; the pool is idle if it was the
//                               last
//   Join while it is idle       the pool is used again, with its pages
//   GiveUp                      another request needs the room: the idle pool is taken out of the
//                               device tier (Retired), its descriptors are closed by tasks of its
//                               tenant, and then its budget is free
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
class DevicePools final : public SessionMemory, public PoolPlane {
 public:
  // `tier` null: this store has no device tier, and every request is refused. `tier` and `metrics`
  // are borrowed.
  DevicePools(const PoolOptions& options, storage::DeviceTier* tier, const Clock& clock,
              ServerMetrics& metrics);

  storage::DeviceTier& tier() const { return *tier_; }

  // The pool of that id in which the session takes part. kInvalidArgument: none.
  absl::StatusOr<storage::DevicePoolNumber> Joined(const Session& session,
                                                   std::string_view pool) const;
  // Any pool of the session's tenant; 0: none.
  storage::DevicePoolNumber OfTenant(const Session& session, std::string_view pool) const;
  // All pools of a tenant.
  std::vector<storage::DevicePoolNumber> AllOf(const std::string& tenant) const;
  // Pools in which any session of the engine takes part.
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
  PoolReply Handle(const std::shared_ptr<Session>& session, const v1::PoolRequest& request,
                   std::vector<UniqueFd> fds) override;
  TimePoint Check() override;

  // SessionMemory.
  bool Holds(const Session& session) const override;
  void CallsEnded(const Session& session) override;
  void ProcessEnded(const Session& session) override;

  struct Totals {
    size_t pools = 0;
    size_t idle_pools = 0;  // pools without a member
    uint64_t given_up = 0;  // ever
    uint64_t descriptors = 0;
    uint64_t descriptors_max = 0;
  };
  Totals totals() const;

 private:
  struct Member {
    std::weak_ptr<Session> session;
    const Engine* engine = nullptr;
    bool sealed = false;     // is given no slots any more
    bool reserving = false;  // a numbered Reserve is being served
    uint64_t last_request = 0;
    std::vector<uint64_t> last_slots;
  };
  struct Pool {
    RandomId id;
    std::string device;
    std::string tenant;
    uint64_t slot_bytes = 0;
    uint64_t handle_bytes = 0;
    SharedFd roster;
    std::map<uint32_t, SharedFd> handles;
    std::set<uint32_t> arriving;  // numbers of handles whose slots the tier does not have yet
    std::map<storage::HolderId, Member> members;
    std::set<storage::HolderId> leaving;  // members, until they hold nothing
    std::set<uint64_t> known_marks;       // marks of members, while the pool recovers
    bool recovering = false;
    bool settling = false;  // a task reads its roster
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

  static storage::HolderId HolderOf(const Session& session) { return session.token().slot(); }
  static bool SameKind(const Pool& pool, const v1::PoolRequest::Join& request,
                       const std::string& tenant);

  absl::Status Join(const std::shared_ptr<Session>& session, const v1::PoolRequest::Join& request,
                    const std::vector<UniqueFd>& fds, PoolReply* reply);
  // Tries once. Another attempt may find the room that this one has made.
  absl::StatusOr<storage::DevicePoolNumber> TryJoin(const std::shared_ptr<Session>& session,
                                                    const v1::PoolRequest::Join& request,
                                                    Roster& roster, PoolReply* reply,
                                                    RoomMaking* room);
  absl::Status Offer(const Session& session, const v1::PoolRequest::Offer& request,
                     std::vector<UniqueFd> fds, PoolReply* reply);
  // The pool, and the number of a handle that is about to come. Once, as TryJoin.
  using Expected = std::pair<storage::DevicePoolNumber, uint32_t>;
  absl::StatusOr<Expected> TryOffer(const Session& session, const v1::PoolRequest::Offer& request,
                                    RoomMaking* room);
  absl::Status Fetch(const Session& session, const v1::PoolRequest::Fetch& request,
                     PoolReply* reply);
  absl::Status Leave(const Session& session, const v1::PoolRequest::Leave& request);
  absl::Status Reclaim(const Session& session, const v1::PoolRequest::Reclaim& request,
                       PoolReply* reply);

  Pools::iterator FindLocked(std::string_view id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Pools::iterator> JoinedLocked(const Session& session, std::string_view id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Pools::iterator BestLocked(const v1::PoolRequest::Join& request, const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `roster` has a file if the pool was an earlier crumbd's; it is consumed if the pool is added.
  absl::StatusOr<Pools::iterator> AddLocked(const v1::PoolRequest::Join& request,
                                            const std::string& tenant, Roster& roster,
                                            RoomMaking* room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Pools::iterator> PoolToJoinLocked(const v1::PoolRequest::Join& request,
                                                   const std::string& tenant, Roster& roster,
                                                   RoomMaking* room)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The number of a handle that is offered.
  absl::StatusOr<uint32_t> NumberLocked(const Pool& pool, const v1::PoolRequest::Offer& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the number and the budget of a handle that is about to come.
  absl::StatusOr<uint32_t> ExpectHandleLocked(Pool& pool, const v1::PoolRequest::Offer& request,
                                              RoomMaking* room)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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
  absl::Status RefuseLocked(const std::string& tenant, const PoolBudget::Verdict& verdict)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static PoolBudget::Amount AmountOf(const Pool& pool);
  // One more than the largest number of a handle.
  static uint64_t EndOf(const Pool& pool);
  // Pools that no process takes part in and that may be given up for the tenant: its own first,
  // the longest idle first.
  std::vector<storage::DevicePoolNumber> IdleLocked(const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns false if a request or lease refers to its pages.
  bool GiveUpLocked(Pools::iterator pool, std::vector<Retired>* retired)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndRetired(std::vector<Retired> retired);
  void DropLeavingLocked(storage::DevicePoolNumber number, Pool& pool)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool EraseMemberLocked(storage::DevicePoolNumber number, Pool& pool, storage::HolderId holder)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the recovery if every process in the roster has reported its slots. Reads the roster.
  void SettleRecovery(storage::DevicePoolNumber number);

  storage::HolderId ChooseDemoter(storage::DevicePoolNumber pool) const;
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
