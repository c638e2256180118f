// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/device_memory.h"
#include "client/gpu/pools/pool_range.h"
#include "client/gpu/pools/slot_records.h"
#include "client/rpc/pool_link.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/page_key.h"
#include "common/roster.h"
#include "common/thread.h"
#include "common/unique_fd.h"
#include "crumb/acquire.h"
#include "crumb/client.h"

namespace crumb::client {

// The sizes of a pool. All members of one pool must use equal slot_bytes and handle_bytes;
// otherwise crumbd gives them pools of their own.
struct DevicePoolOptions {
  uint64_t slot_bytes = 0;                      // size of one fragment's tiles; a multiple of 128
  uint64_t handle_bytes = uint64_t{256} << 20;  // size of one allocation of device memory
  uint64_t bytes_max = 0;  // bound on the pool, including other processes' handles
  // Size of the address range to which handles are mapped.
  uint64_t range_bytes = uint64_t{1} << 40;
  int blank_slots = 64;  // blank slots kept ready; 0: the pool is only read
  Duration call_timeout = std::chrono::seconds(2);  // limit of calls in the background
};

// The present use of the pool by this process, and events since it was opened.
struct DevicePoolStats {
  uint64_t handles = 0;        // mapped handles
  uint64_t blank_slots = 0;    // blank slots that are ready
  uint64_t held_slots = 0;     // slots held by the caller, blank or committed
  uint64_t pages_demoted = 0;  // pages copied to staging memory for crumbd
  uint64_t demotions_failed = 0;
  uint64_t out_of_slots = 0;     // times TakeBlank found no slot
  uint64_t slots_reclaimed = 0;  // held slots that a restarted crumbd has accepted again
};

// DeviceSlot holds one slot of a device pool for the caller. A blank slot is written by the caller
// only; a committed one is read-only. The slot stays where it is until the DeviceSlot is destroyed.
// REQUIRES: the device has finished its reads and writes then, because crumbd may give the slot to
// another process. It must not outlive its DevicePool. Thread-safe.
class DeviceSlot {
 public:
  DeviceSlot(DeviceAddress address, uint64_t number) : address_(address), number_(number) {}

  DeviceAddress address() const { return address_; }
  uint64_t number() const { return number_; }  // number of the slot in the pool

 private:
  DeviceAddress address_;
  uint64_t number_;
};

// DevicePool holds the slots of one device and one slot size that all workers of a tenant on this
// host use, mapped into one address range of this process. It continues to work without crumbd:
// held slots stay, and TakeBlank uses up the slots that are ready. Its thread keeps blank slots
// ready, joins the pool again after crumbd has restarted, and copies pages whose slots crumbd needs
// to staging memory (demotion). See PoolSession for the states of a slot. Thread-safe.
//
// device_pool.cc takes, holds and releases slots, and runs the thread; device_pool_join.cc joins
// the pool and reports held slots to crumbd.
//
// The thread ("crumb-pool"), whenever it is woken:
//     no session        join, offer handles, claim held slots, report the mark
//     too few blanks    reserve; if crumbd has none, grow the range by handles; else retry later
//     demotions         copy the page to staging memory, commit it there, report it
//
// Lock order: reserving_ before mutex_. Calls to crumbd are made without mutex_, so that TakeBlank
// never waits for crumbd.
class DevicePool final : private PoolListener {
 public:
  // A fragment to commit: work that has finished wrote its tiles to `slot`.
  struct Fragment {
    std::shared_ptr<const DeviceSlot> slot;
    FragmentHeader header;
  };

  // `memory` and `client` must outlive the pool. crumbd need not be connected. kInvalidArgument: an
  // option is wrong; kFailedPrecondition: `client` has no shared memory, or takes part in this
  // device's pool of these sizes already.
  static absl::StatusOr<std::unique_ptr<DevicePool>> Open(const DevicePoolOptions& options,
                                                          DeviceMemory& memory, Client& client);

  // Ends calls under way. REQUIRES: no slot is held.
  ~DevicePool() override;

  // Returns a blank slot without blocking, or null if none is ready.
  std::shared_ptr<const DeviceSlot> TakeBlank();
  // Returns up to `count` blank slots: those that are ready, then as many as crumbd grants. Blocks
  // on crumbd for up to `timeout` per call. Each group of `together` slots is released with its
  // last slot.
  std::vector<std::shared_ptr<const DeviceSlot>> Reserve(int count, Duration timeout,
                                                         int together = 1);
  // Blocks until `count` blank slots are ready. Returns false if they are not within `timeout`.
  bool WaitBlank(int count, Duration timeout);

  // Makes fragments visible to the tenant's workers. Slots stay held whatever the outcome; those
  // that were not stored stay the caller's own. kAborted: crumbd has restarted meanwhile.
  absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                    std::span<const Fragment> fragments,
                                                    Duration timeout);

  // Returns the id for AcquireRequest::pools; zeros if the pool is not joined now.
  PoolId id() const {
    MutexLock lock(&mutex_);
    return session_ == nullptr ? PoolId() : known_;
  }
  // Holds the slots of fragments that an Acquire found in this pool, together with `lease`, and
  // maps new handles first. The slots are released together with the last of them. After an error
  // none is held: kNotFound: a fragment lies in another pool; kAborted: crumbd has restarted since
  // it granted the lease; kUnavailable: a handle has to be requested from crumbd, which is not
  // connected.
  absl::StatusOr<std::vector<std::shared_ptr<const DeviceSlot>>> Hold(
      std::span<const DeviceFragment* const> fragments, std::shared_ptr<const Lease> lease);

  // Returns the headers that crumbd has for these slots, one per slot. They stay valid as long as
  // the slots are held.
  absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(
      std::span<const uint64_t> slots, Duration timeout);
  // Makes this crumbd, and those that follow it, withdraw damaged pages; keys[i] is the key of the
  // page in slots[i], which is held and stays held.
  absl::Status Withdraw(std::span<const uint64_t> slots, std::span<const PageKey> keys,
                        Duration timeout);

  DeviceAddress base() const { return range_->base(); }  // start of the address range
  uint64_t slot_bytes() const { return options_.slot_bytes; }
  DevicePoolStats stats() const;

 private:
  struct HeldSlots;

  // Time between attempts to join, or to get blank slots from a full pool; it doubles.
  static constexpr Duration kRetryMin = std::chrono::milliseconds(50);
  static constexpr Duration kRetryMax = std::chrono::seconds(2);

  DevicePool(const DevicePoolOptions& options, DeviceMemory& memory, Client& client,
             std::unique_ptr<PoolRange> range)
      : options_(options),
        memory_(memory),
        client_(client),
        link_(*client.pools()),
        name_{memory.uuid(), options.slot_bytes, options.handle_bytes},
        range_(std::move(range)) {}

  void OnConnected() override {
    MutexLock lock(&mutex_);
    join_due_ = true;
    changed_.NotifyAll();
  }
  // Queues the pages that crumbd wants to be copied; beyond 4,096 they are dropped.
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
  void EndUses(std::span<const DeviceSlot> slots);
  void EndUseOf(uint64_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Functions that only the thread calls.
  // The thread: joins, settles lost connections, demotes and refills whenever it is woken.
  void Run();
  // Waits for work. Returns false if the pool is stopping.
  bool Wait();
  // Joins the pool if the connection is new or lost: the ready slots are released, the held ones
  // are claimed over the new session.
  void JoinAgain();
  // Joins once. On an error the session is settled later, because crumbd may count slots to it.
  absl::Status Join();
  // Maps the handles and, unless it is the first session, offers this process's handles and claims
  // its held slots. session_ is set at the end.
  absl::Status StartSession(const std::shared_ptr<PoolSession>& session, UniqueFd roster);
  // Keeps a lost session until it is settled; the oldest goes beyond 16.
  void AddFormer(std::shared_ptr<PoolSession> session);
  // Makes crumbd release slots that it records as held over lost connections and that are not in
  // use.
  void SettleFormer();
  // Returns the present session. kUnavailable: the pool is not joined.
  absl::StatusOr<std::shared_ptr<PoolSession>> Joined() const;
  // Claims all held slots, keyspace by keyspace, and moves them to the session.
  absl::Status ClaimAll(const std::shared_ptr<PoolSession>& session);
  // Checks that the leased fragments lie in this pool and that the present crumbd knows the lease.
  absl::Status CheckLeased(std::span<const DeviceFragment* const> fragments,
                           const Lease& lease) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Claims slots whose claims were refused again without headers.
  static absl::Status ClaimWithoutHeaders(PoolSession& session, std::span<const SlotClaim> claims,
                                          std::vector<bool>* claimed);
  // Returns false if too few blank slots are ready afterwards.
  bool Refill();
  // Copies queued pages to staging memory, 16 at a time, and reports them done, copied or not.
  void DemoteAll();
  // Copies one page and commits the copy. kResourceExhausted: there is no room for it.
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
  bool device_full_ = false;  // reset when the pool is joined again
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
