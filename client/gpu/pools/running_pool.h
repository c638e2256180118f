// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/gpu/pools/device_pool.h"
#include "client/gpu/pools/pool_range.h"
#include "client/gpu/pools/slot_records.h"
#include "client/rpc/pool_link.h"
#include "common/mutex.h"
#include "common/roster.h"
#include "common/thread.h"
#include "common/unique_fd.h"

namespace crumb::client {

// What DevicePool::Open makes. running_pool.cc: slots taken, held and let go, and the thread;
// running_pool_join.cc: joining, and what crumbd is told of what is held.
class RunningPool final : public DevicePool, private PoolListener {
 public:
  RunningPool(const DevicePoolOptions& options, DeviceMemory& memory, Client& client,
              std::unique_ptr<PoolRange> range)
      : options_(options),
        memory_(memory),
        client_(client),
        link_(*client.pools()),
        name_{memory.uuid(), options.slot_bytes, options.handle_bytes},
        range_(std::move(range)) {}

  ~RunningPool() override;

  // Once, before all else. kFailedPrecondition: the client takes part in such a pool already.
  absl::Status Start();

  std::shared_ptr<const DeviceSlot> TakeBlank() override;
  std::vector<std::shared_ptr<const DeviceSlot>> Reserve(int count, Duration timeout,
                                                         int together) override;
  bool WaitBlank(int count, Duration timeout) override;
  absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                    std::span<const Fragment> fragments,
                                                    Duration timeout) override;
  PoolId id() const override {
    MutexLock lock(&mutex_);
    return session_ == nullptr ? PoolId() : known_;
  }
  absl::StatusOr<std::vector<std::shared_ptr<const DeviceSlot>>> Hold(
      std::span<const DeviceFragment* const> fragments,
      std::shared_ptr<const Lease> lease) override;
  absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(
      std::span<const uint64_t> slots, Duration timeout) override;
  absl::Status Withdraw(std::span<const uint64_t> slots, std::span<const PageKey> keys,
                        Duration timeout) override;
  DeviceAddress base() const override { return range_->base(); }
  uint64_t slot_bytes() const override { return options_.slot_bytes; }
  DevicePoolStats stats() const override;

  DeviceAddress AddressOf(uint64_t slot) const { return range_->AddressOf(slot); }

 private:
  class HeldSlot;
  struct HeldSlots;

  // Between attempts to join, and to get blank slots from a pool that is full; doubles.
  static constexpr Duration kRetryMin = std::chrono::milliseconds(50);
  static constexpr Duration kRetryMax = std::chrono::seconds(2);

  void OnConnected() override {
    MutexLock lock(&mutex_);
    join_due_ = true;
    changed_.NotifyAll();
  }
  void OnDemotions(const PoolId& pool, std::vector<Demotion> demotions) override;

  // Blank slots from crumbd, within reach.
  absl::StatusOr<std::vector<uint64_t>> ReserveMore(PoolSession& session, int count,
                                                    Duration timeout)
      ABSL_LOCKS_EXCLUDED(reserving_);
  // Lets go of them together.
  void HoldBlanks(std::span<const uint64_t> slots,
                  std::vector<std::shared_ptr<const DeviceSlot>>* held)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A use of each of them has ended.
  void EndUses(std::span<const HeldSlot> slots);
  void EndUseOf(uint64_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The thread's.
  void Run();
  bool Wait();
  void JoinAgain();
  absl::Status Join();
  absl::Status StartSession(const std::shared_ptr<PoolSession>& session, UniqueFd roster);
  void AddFormer(std::shared_ptr<PoolSession> session);
  // Tells crumbd what is used of what it thinks is held over connections that were lost.
  void SettleFormer();
  absl::StatusOr<std::shared_ptr<PoolSession>> Joined() const;
  absl::Status ClaimAll(const std::shared_ptr<PoolSession>& session);
  // Whether what the lease names is in this pool, and crumbd knows of it.
  absl::Status CheckLeased(std::span<const DeviceFragment* const> fragments,
                           const Lease& lease) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Claims without headers what was refused with them.
  static absl::Status ClaimWithoutHeaders(PoolSession& session, std::span<const SlotClaim> claims,
                                          std::vector<bool>* claimed);
  // False: the stock is low still.
  bool Refill();
  void DemoteAll();
  absl::Status CopyOne(const Demotion& demotion);

  const DevicePoolOptions options_;
  DeviceMemory& memory_;
  Client& client_;
  PoolLink& link_;
  const PoolName name_;
  const std::unique_ptr<PoolRange> range_;

  // The thread's.
  RosterMark mark_;
  TimePoint retry_at_;
  Duration retry_after_ = kRetryMin;
  bool failure_logged_ = false;
  bool device_full_ = false;                         // until the pool is joined again
  std::deque<std::shared_ptr<PoolSession>> former_;  // not settled yet

  Mutex reserving_;  // held while crumbd is asked for slots: one question at a time

  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::shared_ptr<PoolSession> session_ ABSL_GUARDED_BY(mutex_);  // null: not joined
  PoolId known_ ABSL_GUARDED_BY(mutex_);
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;  // of the crumbd that was told last what is held
  std::vector<uint64_t> stock_ ABSL_GUARDED_BY(mutex_);  // blank, of session_
  SlotRecords records_ ABSL_GUARDED_BY(mutex_);
  std::deque<Demotion> demotions_ ABSL_GUARDED_BY(mutex_);
  bool join_due_ ABSL_GUARDED_BY(mutex_) = true;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  DevicePoolStats stats_ ABSL_GUARDED_BY(mutex_);

  Thread thread_;
};

}  // namespace crumb::client
