// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/device/device_pool_index.h"
#include "storage/device/device_state.h"

namespace crumb::storage {

// Device pools and their slots, as the processes see them that map the pools: the server adds and
// removes pools and handles, and reserves, commits, claims and releases slots in the name of a
// process. It chooses the pages to evict, and requests processes to copy them to host memory first
// (Demoters); it neither reads nor copies their bytes. DevicePoolIndex has the states of a slot.
// Thread-safe.
class DeviceSlots {
 public:
  // `state` must outlive this.
  explicit DeviceSlots(DeviceState& state) : state_(state) {}
  DeviceSlots(const DeviceSlots&) = delete;

  // Requests that copy pages from slots to the host tier. The functions are called without the lock
  // and must not block.
  struct Demoters {
    // A process that maps the pool; 0: there is none.
    std::function<HolderId(DevicePoolNumber)> choose;
    // Requests the copies from the process. Returns false if its session has ended.
    std::function<bool(DevicePoolNumber, HolderId, std::span<const DemotionWork>)> request;
  };

  // REQUIRES: no pool was added yet. The functions must stay valid as long as calls are made.
  void SetDemoters(Demoters demoters) { demoters_ = std::move(demoters); }

  // Adds a pool and returns its number, which is never used again. kInvalidArgument: the sizes.
  // DevicePoolIndex explains `recovering` and `removed_marks`.
  absl::StatusOr<DevicePoolNumber> AddPool(uint64_t slot_bytes, uint64_t handle_bytes,
                                           bool recovering,
                                           std::optional<SlotMarks> removed_marks = std::nullopt);
  // A pool that has been taken out of the tier: no call finds it any more.
  struct TakenPool {
    DevicePoolNumber number = 0;
    std::unique_ptr<DevicePoolIndex> index;  // null: there was no such pool
  };
  // Takes a pool out, in constant time. Returns none if one of its slots is held or one of its
  // pages referred to. The caller must pass the result to EndPool.
  std::optional<TakenPool> TakePool(DevicePoolNumber pool);
  // Announces that the pages of a taken pool are gone, and frees its memory. Takes time in the
  // number of its pages, almost all of it without the lock.
  void EndPool(TakenPool pool);
  // Returns false if there is no such pool or the handle is there already.
  bool AddHandle(DevicePoolNumber pool, uint32_t number);
  void EndRecovery(DevicePoolNumber pool);
  bool recovering(DevicePoolNumber pool) const;

  // Takes up to `count` blank slots for the holder and evicts pages if too few slots are free. A
  // page that no tier below has is first copied by a process that maps the pool (Demoters); it is
  // lost, and counted, if there is no such process or too many copies are under way.
  std::vector<uint64_t> Reserve(DevicePoolNumber pool, HolderId holder, size_t count);
  // Calls DevicePoolIndex::Commit. kAlreadyExists: the pool has tiles of the page; kAborted: the
  // fragment is of a dropped generation.
  absl::Status Commit(DevicePoolNumber pool, HolderId holder, uint64_t slot,
                      const std::shared_ptr<const FragmentHeader>& header,
                      uint32_t logical_tile_bytes);
  // Calls DevicePoolIndex::Claim, without the header if the page was deleted or may have been
  // (DeletionEpochs); the pool's next index will not have such a page either.
  bool Claim(DevicePoolNumber pool, HolderId holder, uint64_t slot,
             std::shared_ptr<const FragmentHeader> header, uint32_t logical_tile_bytes);
  // Returns DevicePoolIndex::PageAt for each slot.
  std::vector<std::shared_ptr<const FragmentHeader>> HeadersAt(
      DevicePoolNumber pool, std::span<const uint64_t> slots) const;
  // Removes a damaged page from the pool, and counts it. Processes and leases that use it keep its
  // slots; later requests miss it. Returns false if the slot has no such page.
  bool Withdraw(DevicePoolNumber pool, uint64_t slot, const PageKey& key);
  // Ends the holder's holds of these slots. Returns how many of the slots it did not hold.
  size_t Release(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> slots);
  // Ends all holds of the holder except those of the slots in `kept`. Returns how many it ended.
  size_t ReleaseAllBut(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> kept);
  // Records that the holder has copied these slots to the host tier. Returns how many of them it
  // was not requested to copy.
  size_t Demoted(DevicePoolNumber pool, HolderId holder, std::span<const uint64_t> slots);
  // Ends all holds of a process that has exited. Pages that it was requested to copy are lost.
  void EndHolder(HolderId holder);
  // Ends the copies that a process was requested to make, because it can make no more. Their pages
  // are lost; its holds stay.
  void EndDemotions(HolderId holder);
  // Does the same in one pool.
  void EndDemotions(DevicePoolNumber pool, HolderId holder);
  size_t HeldBy(DevicePoolNumber pool, HolderId holder) const;

 private:
  // A page chosen to leave.
  struct Leaving {
    PoolDepartures::Departure departure;
    std::vector<FragmentMeta> fragments;
  };
  void TakeBlanks(DevicePoolIndex& pool, HolderId holder, size_t count,
                  std::vector<uint64_t>* slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  std::vector<Leaving> ChooseLeaving(DevicePoolIndex& pool, size_t missing)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mutex);
  // Requests processes to copy `leaving` to a lower tier. If no process can copy a page, it is
  // evicted as long as `needed` slots are not free.
  void Demote(DevicePoolNumber pool, const std::vector<Leaving>& leaving, size_t needed);
  std::vector<DemotionWork> BeginDemotions(DevicePoolNumber pool, HolderId holder,
                                           std::span<const Leaving> leaving, size_t* requested);

  DeviceState& state_;
  Demoters demoters_;
};

}  // namespace crumb::storage
