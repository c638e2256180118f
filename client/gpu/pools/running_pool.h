// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/gpu/pools/device_pool.h"
#include "client/gpu/pools/pool_range.h"
#include "client/rpc/pool_link.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/roster.h"
#include "common/thread.h"
#include "common/unique_fd.h"

namespace crumb::client {

// The state of one slot of a pool in this process.
struct SlotRecord {
  int uses = 0;  // 0: the slot is not used
  bool committed = false;
  bool withdrawn = false;  // the page in the slot is damaged
  // The header of the page in the slot, with checksums: as this process committed it (`header`), or
  // as crumbd sent it (`encoded_header`). Neither: the slot is blank, or its page is unknown.
  std::shared_ptr<const FragmentHeader> header;
  std::span<const std::byte> encoded_header;
  std::shared_ptr<const void> encoded_header_keeper;
  std::shared_ptr<PoolSession> held_by;  // the session that reserved it; null: a lease holds it
};

// SlotRecords has the records of a pool's slots by number. Not thread-safe.
class SlotRecords {
 public:
  // Adds a use of the slot and returns its record.
  SlotRecord& Use(uint64_t slot) {
    if (slot >= records_.size()) records_.resize(slot + 1);
    SlotRecord& record = records_[slot];
    if (record.uses++ == 0) ++used_;
    return record;
  }
  // Returns null if the slot is not used. The result is valid until the next Use.
  SlotRecord* Find(uint64_t slot) {
    return slot < records_.size() && records_[slot].uses > 0 ? &records_[slot] : nullptr;
  }
  void Erase(SlotRecord& record) {
    record = SlotRecord();
    --used_;
  }
  size_t used() const { return used_; }
  // Calls visit(slot, record) for every slot in use, in ascending order.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (uint64_t slot = 0; slot < records_.size(); ++slot) {
      if (records_[slot].uses > 0) visit(slot, records_[slot]);
    }
  }

 private:
  std::vector<SlotRecord> records_;
  size_t used_ = 0;
};

// RunningPool is the DevicePool that DevicePool::Open creates. running_pool.cc takes, holds and
// releases slots, and runs the thread; running_pool_join.cc joins the pool and reports held slots
// to crumbd.
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

  // Called once, before any other function. kFailedPrecondition: the client takes part in such a
  // pool already.
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

  // Time between attempts to join, or to get blank slots from a full pool; it doubles.
  static constexpr Duration kRetryMin = std::chrono::milliseconds(50);
  static constexpr Duration kRetryMax = std::chrono::seconds(2);

  void OnConnected() override {
    MutexLock lock(&mutex_);
    join_due_ = true;
    changed_.NotifyAll();
  }
  void OnDemotions(const PoolId& pool, std::vector<Demotion> demotions) override;

  // Reserves blank slots and maps their handles.
  absl::StatusOr<std::vector<uint64_t>> ReserveMore(PoolSession& session, int count,
                                                    Duration timeout)
      ABSL_LOCKS_EXCLUDED(reserving_);
  // Holds slots as one group, which is released together.
  void HoldBlanks(std::span<const uint64_t> slots,
                  std::vector<std::shared_ptr<const DeviceSlot>>* held)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends one use of each of these slots.
  void EndUses(std::span<const HeldSlot> slots);
  void EndUseOf(uint64_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Functions that only the thread calls.
  void Run();
  bool Wait();
  void JoinAgain();
  absl::Status Join();
  absl::Status StartSession(const std::shared_ptr<PoolSession>& session, UniqueFd roster);
  void AddFormer(std::shared_ptr<PoolSession> session);
  // Makes crumbd release slots that it records as held over lost connections and that are not in
  // use.
  void SettleFormer();
  absl::StatusOr<std::shared_ptr<PoolSession>> Joined() const;
  absl::Status ClaimAll(const std::shared_ptr<PoolSession>& session);
  // Checks that the leased fragments lie in this pool and that the present crumbd knows the lease.
  absl::Status CheckLeased(std::span<const DeviceFragment* const> fragments,
                           const Lease& lease) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Claims slots whose claims were refused again without headers.
  static absl::Status ClaimWithoutHeaders(PoolSession& session, std::span<const SlotClaim> claims,
                                          std::vector<bool>* claimed);
  // Returns false if too few blank slots are ready afterwards.
  bool Refill();
  void DemoteAll();
  absl::Status CopyOne(const Demotion& demotion);

  const DevicePoolOptions options_;
  DeviceMemory& memory_;
  Client& client_;
  PoolLink& link_;
  const PoolName name_;
  const std::unique_ptr<PoolRange> range_;

  // Members that only the thread uses.
  RosterMark mark_;
  TimePoint retry_at_;
  Duration retry_after_ = kRetryMin;
  bool failure_logged_ = false;
  bool device_full_ = false;  // until the pool is joined again
  // sessions of lost connections that are not settled yet
  std::deque<std::shared_ptr<PoolSession>> former_;

  Mutex reserving_;  // held during a Reserve, so that one is in flight at a time

  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::shared_ptr<PoolSession> session_ ABSL_GUARDED_BY(mutex_);  // null: the pool is not joined
  PoolId known_ ABSL_GUARDED_BY(mutex_);
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;  // epoch of the crumbd that knows all held slots
  std::vector<uint64_t> stock_ ABSL_GUARDED_BY(mutex_);  // blank slots of session_
  SlotRecords records_ ABSL_GUARDED_BY(mutex_);
  std::deque<Demotion> demotions_ ABSL_GUARDED_BY(mutex_);
  bool join_due_ ABSL_GUARDED_BY(mutex_) = true;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  DevicePoolStats stats_ ABSL_GUARDED_BY(mutex_);

  Thread thread_;
};

}  // namespace crumb::client
