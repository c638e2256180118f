// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "common/roster.h"
#include "storage/device/pool_departures.h"
#include "storage/device/uniform_slots.h"
#include "storage/index/page_table.h"

namespace crumb::storage {

// A page whose slot is needed, and that a process is to copy to the host tier before that.
struct DemotionWork {
  uint64_t slot = 0;
  std::shared_ptr<const FragmentHeader> header;
};

// The slots and pages of one device pool. A slot is in one of these states:
//
//   state      meaning                                   next state, and the call that leads to it
//   free       it has no page, and no process holds it   blank: TakeBlank
//   blank      a process holds it and writes a page      held: Commit
//                                                        free: Release, EndHolds
//   held       it has a fragment, and processes hold it  committed: Release, EndHolds (last hold)
//   committed  it has a fragment, and no process holds   free: PoolDepartures::End(kGone)
//              it; leases may refer to its page          demoting: PoolDepartures::Demote
//   demoting   its page was chosen to leave, and a       free: Demoted (it is copied) or
//              process copies it to the host tier          DropDemotions (it is lost)
//                                                        committed: the same, if its page is leased
//
// Remove takes the page of a held, committed or demoting slot out of the table at once; the slot is
// free when its last hold and reference have ended. In a pool that recovers, the use of slots is
// unknown: Claim makes them blank (several processes may hold such a slot and not know its page) or
// held, and EndRecovery frees the others.
//
// The index never reads the slots' bytes. Not thread-safe: the tier's lock covers it.
class DevicePoolIndex {
 public:
  // `recovering`: the pool is of an earlier crumbd. TakeBlank and PoolDepartures::Begin return none
  // until EndRecovery, because processes that have not reconnected may use any slot.
  DevicePoolIndex(std::unique_ptr<EvictionPolicy> policy, uint32_t slot_bytes,
                  uint64_t handle_bytes, bool recovering);

  // Sets the marks of slots in use whose page was removed, or was refused by Commit or Claim, for
  // the pool's next index; none: nothing is marked. A slot with a mark is claimed without its page,
  // so the next index never has a page that this one could not have removed.
  void SetRemovedMarks(std::optional<SlotMarks> marks) { removed_marks_ = std::move(marks); }
  // Returns the epoch of the marks; 0: there are none.
  uint64_t epoch() const { return removed_marks_ ? removed_marks_->epoch() : 0; }
  void SetEpoch(uint64_t epoch) {
    if (removed_marks_) removed_marks_->SetEpoch(epoch);
  }
  // The slot is in use, and its page is not a hit of the pool's next index either.
  void MarkRemoved(uint64_t slot) {
    if (removed_marks_) removed_marks_->Set(slot);
  }
  // Removes a page, so that it is a hit neither here nor in the pool's next index.
  void Remove(PageHandle page, RemovalReason reason, TimePoint now);

  // The index's room for each slot of one handle. It grows with the handle, so callers allocate it
  // outside their locks.
  struct HandleRoom {
    explicit HandleRoom(uint32_t slots)
        : states(slots, UniformSlots::State::kFresh), headers(slots), pages(slots, kNoPage) {}
    std::vector<UniformSlots::State> states;
    std::vector<std::shared_ptr<const FragmentHeader>> headers;
    std::vector<PageHandle> pages;
  };
  // Returns false if the handle is there already. REQUIRES: the room is for slots().per_handle().
  bool AddHandle(uint32_t number, HandleRoom room);
  const UniformSlots& slots() const { return slots_; }
  PageTable& table() { return table_; }
  const PageTable& table() const { return table_; }
  void EndRecovery() { slots_.EndRecovery(); }

  // Makes a free slot blank for `holder` to write. Returns none if no slot is free.
  std::optional<uint64_t> TakeBlank(HolderId holder);
  // Inserts a fragment that the holder has written to a blank slot, which becomes held.
  // kInvalidArgument: the slot is not blank, is too small, or other processes hold it too. Other
  // errors are those of PageTable::Insert. On error the slot stays blank.
  absl::Status Commit(HolderId holder, uint64_t slot,
                      const std::shared_ptr<const FragmentHeader>& header,
                      uint32_t logical_tile_bytes, TimePoint now);
  // Restores a hold that the holder had before this pool was recreated. `header` names the page in
  // the slot; null if it has none or the holder does not know it. If several processes claim one
  // slot, the header of any of them counts for all. A page that was removed before counts as null,
  // and the slot is blank. Returns false if there is no such slot, if it has another page, or if
  // the recovery has ended.
  bool Claim(HolderId holder, uint64_t slot, std::shared_ptr<const FragmentHeader> header,
             uint32_t logical_tile_bytes, TimePoint now);
  // Ends a hold. Returns false if the holder does not hold the slot.
  bool Release(HolderId holder, uint64_t slot);
  // Forgets that an ended holder holds slots and returns them. Each stays in use until EndHolds is
  // called with it: a holder of many slots is ended in pieces.
  std::vector<uint64_t> TakeHolds(HolderId holder);
  void EndHolds(std::span<const uint64_t> slots);
  std::vector<uint64_t> HeldSlots(HolderId holder) const;
  size_t HeldBy(HolderId holder) const;
  size_t held() const { return held_; }
  // Whether a slot is held or a page is referred to: by holders, leases, departures, and requests
  // in progress. While it is true, handles of this index are in use, and it must not be destroyed.
  bool InUse() const { return held_ > 0 || table_.references() > 0; }
  size_t blank() const { return blank_; }

  // Pages that were chosen to leave.
  PoolDepartures& departures() { return departures_; }

  std::shared_ptr<const FragmentHeader> HeaderAt(const Slot& slot) const {
    return HeaderOf(slots_.NumberOf(slot));
  }
  // Returns the header of the page in a slot that is taken, also of a removed page that is still in
  // use. Null: there is no such slot, or no page in it.
  std::shared_ptr<const FragmentHeader> PageAt(uint64_t slot) const;
  // Removes the page `key`, of which the slot has a damaged fragment. Returns false if the slot has
  // no such page.
  bool Withdraw(uint64_t slot, const PageKey& key, TimePoint now);

 private:
  // The index's entries for the slots of one handle.
  struct SlotPages {
    std::vector<std::shared_ptr<const FragmentHeader>> headers;  // header of the last fragment
    std::vector<PageHandle> pages;  // page of a slot that is taken; kNoPage if it is blank
  };
  std::shared_ptr<const FragmentHeader>& HeaderOf(uint64_t slot) {
    return slot_pages_[slot / slots_.per_handle()].headers[slot % slots_.per_handle()];
  }
  const std::shared_ptr<const FragmentHeader>& HeaderOf(uint64_t slot) const {
    return slot_pages_[slot / slots_.per_handle()].headers[slot % slots_.per_handle()];
  }
  PageHandle& PageOf(uint64_t slot) {
    return slot_pages_[slot / slots_.per_handle()].pages[slot % slots_.per_handle()];
  }
  PageHandle PageOf(uint64_t slot) const {
    return slot_pages_[slot / slots_.per_handle()].pages[slot % slots_.per_handle()];
  }

  void LetGo(uint64_t slot);
  void Keep(HolderId holder, uint64_t slot);
  bool Holds(HolderId holder, uint64_t slot) const;
  // Returns the number of processes that hold the blank slot.
  size_t HoldersOf(uint64_t blank) const;
  absl::StatusOr<PageHandle> Insert(uint64_t slot,
                                    const std::shared_ptr<const FragmentHeader>& header,
                                    uint32_t logical_tile_bytes, TimePoint now);

  UniformSlots slots_;
  PageTable table_;
  PoolDepartures departures_;
  std::optional<SlotMarks> removed_marks_;
  absl::flat_hash_map<HolderId, absl::flat_hash_set<uint64_t>> holds_;  // slots
  size_t held_ = 0;                                                     // holds of any kind
  size_t blank_ = 0;                              // slots that are held without a page
  absl::flat_hash_map<uint64_t, size_t> shared_;  // holders of such a slot, if several
  std::vector<SlotPages> slot_pages_;             // indexed by handle number
};

}  // namespace crumb::storage
