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
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/unique_fd.h"
#include "crumb/v1/session.pb.h"
#include "server/device/pool_options.h"
#include "server/metrics/server_metrics.h"
#include "server/session/random_id.h"
#include "server/session/session.h"
#include "server/session/session_memory.h"
#include "storage/device_tier.h"

namespace crumb::server {

// What is said over the socket in answer to a PoolRequest.
struct PoolReply {
  v1::PoolAnswer answer;
  std::vector<UniqueFd> fds;
};

// The device pools of this host: whose they are, the descriptors that keep their memory alive, and
// which processes take part. Slots and pages are the device tier's. Thread-safe.
class DevicePools final : public SessionMemory {
 public:
  // `tier` null: this store has no device tier, and every request is refused. `metrics` is
  // borrowed.
  DevicePools(const PoolOptions& options, storage::DeviceTier* tier, const Clock& clock,
              ServerMetrics& metrics);

  bool enabled() const { return tier_ != nullptr && options_.pools_max > 0; }
  storage::DeviceTier& tier() const { return *tier_; }

  // Answers a message of the session's process. Errors are in the answer.
  PoolReply Handle(const std::shared_ptr<Session>& session, const v1::PoolRequest& request,
                   std::vector<UniqueFd> fds);

  // The pool of that id in which the session takes part. kInvalidArgument: none.
  absl::StatusOr<storage::DevicePoolNumber> Joined(const Session& session,
                                                   std::string_view pool) const;
  // Any pool of the session's tenant; 0: none.
  storage::DevicePoolNumber OfTenant(const Session& session, std::string_view pool) const;
  // All pools of a tenant.
  std::vector<storage::DevicePoolNumber> AllOf(const std::string& tenant) const;
  // Pools in which any session of the engine takes part.
  std::vector<storage::DevicePoolNumber> OfEngine(const Engine& engine) const;

  // Reserves blank slots for the session. `request` numbers the call, in ascending order; 0: none.
  // A caller repeats a number until it has the answer: the last one gives the same slots again, an
  // earlier one gives none. A session that has closed meanwhile gets none. kUnavailable: the
  // session's last numbered call is still being served; a second one beside it would give slots of
  // which the caller never hears.
  absl::StatusOr<std::vector<uint64_t>> Reserve(const Session& session,
                                                storage::DevicePoolNumber pool, uint64_t request,
                                                size_t count);

  // Lets go of what the session holds in the pool but `kept`. The process has another session: this
  // one is given nothing more there, whatever is still under way. Answers how many slots went.
  size_t ReleaseAllBut(const Session& session, storage::DevicePoolNumber pool,
                       std::span<const uint64_t> kept);
  // Whether the session is given nothing more: that was called, or the session has closed. A caller
  // that has just given it slots takes them back.
  bool Sealed(const Session& session, storage::DevicePoolNumber pool) const;

  // Gives pools up whose time is over, and ends recoveries. Answers when to come again.
  TimePoint Check();

  // SessionMemory.
  bool Holds(const Session& session) const override;
  void CallsEnded(const Session& session) override;
  void ProcessEnded(const Session& session) override;

  struct Totals {
    size_t pools = 0;
    size_t idle_pools = 0;  // that no process takes part in
    uint64_t given_up = 0;  // ever
  };
  Totals totals() const;

 private:
  struct Member {
    std::weak_ptr<Session> session;
    const Engine* engine = nullptr;
    bool leaving = false;    // once it holds nothing
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
    UniqueFd roster;
    std::map<uint32_t, UniqueFd> handles;
    std::map<storage::HolderId, Member> members;
    std::set<uint64_t> known_marks;  // of members, while it recovers
    bool recovering = false;
    TimePoint idle_since;
  };
  using Pools = std::map<storage::DevicePoolNumber, Pool>;

  static storage::HolderId HolderOf(const Session& session) { return session.token().slot(); }

  absl::Status Join(const std::shared_ptr<Session>& session, const v1::PoolRequest::Join& request,
                    std::vector<UniqueFd> fds, PoolReply* reply);
  absl::Status Offer(const Session& session, const v1::PoolRequest::Offer& request,
                     std::vector<UniqueFd> fds, PoolReply* reply);
  absl::Status Fetch(const Session& session, const v1::PoolRequest::Fetch& request,
                     PoolReply* reply);
  absl::Status Leave(const Session& session, const v1::PoolRequest::Leave& request);
  // Slots that crumbd has room for in all pools, `pool` having handles below `end`.
  uint64_t SlotsLocked(const Pool& pool, uint64_t end) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropLeaving(storage::DevicePoolNumber number, Pool& pool);
  absl::Status Reclaim(const v1::PoolRequest::Reclaim& request, PoolReply* reply);

  Pools::iterator FindLocked(std::string_view id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Pools::iterator> JoinedLocked(const Session& session, std::string_view id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Pools::iterator BestLocked(const v1::PoolRequest::Join& request, const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Pools::iterator> AddLocked(const v1::PoolRequest::Join& request,
                                            const std::string& tenant, std::vector<UniqueFd> fds)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status AddHandles(const Pool& pool, uint32_t first, PoolReply* reply);
  bool GiveUpLocked(Pools::iterator pool) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SettleRecoveryLocked(Pools::iterator pool) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  storage::HolderId ChooseDemoter(storage::DevicePoolNumber pool) const;
  bool AskDemoter(storage::DevicePoolNumber pool, storage::HolderId holder,
                  std::span<const storage::DemotionWork> work) const;

  const PoolOptions options_;
  storage::DeviceTier* const tier_;
  const Clock& clock_;
  ServerMetrics& metrics_;

  mutable Mutex mutex_;
  Pools pools_ ABSL_GUARDED_BY(mutex_);
  uint64_t given_up_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb::server
