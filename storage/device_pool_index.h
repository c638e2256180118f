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
#include "storage/page_table.h"
#include "storage/uniform_slots.h"

namespace crumb::storage {

// Whoever holds slots of device pools: a process.
using HolderId = uint64_t;

// A page whose slot is needed: to be copied to where it stays, before the slot is used again.
struct DemotionWork {
  uint64_t slot = 0;
  std::shared_ptr<const FragmentHeader> header;
};

// One device pool's slots and pages. A slot is free; blank in the hands of one process, or of
// several that had it before the pool was made anew and do not say what it holds; or it holds a
// fragment, which processes may hold besides. The bytes are the processes' own business: nothing
// here reads them. Not thread-safe: the tier's lock covers it.
class DevicePoolIndex {
 public:
  // `recovering`: an earlier crumbd's pool. No slot is given out, and no page leaves, until
  // EndRecovery: whoever is not back may use it.
  DevicePoolIndex(std::unique_ptr<EvictionPolicy> policy, uint32_t slot_bytes,
                  uint64_t handle_bytes, bool recovering);

  bool AddHandle(uint32_t number);
  const UniformSlots& slots() const { return slots_; }
  PageTable& table() { return table_; }
  const PageTable& table() const { return table_; }
  bool recovering() const { return recovering_; }
  void EndRecovery();

  // A free slot for `holder` to write.
  std::optional<uint64_t> TakeBlank(HolderId holder);
  // Makes a blank slot that the holder alone has a fragment that it holds. kInvalidArgument: it is
  // no such slot, or too small; else as PageTable::Insert, and the slot stays blank.
  absl::Status Commit(HolderId holder, uint64_t slot,
                      const std::shared_ptr<const FragmentHeader>& header,
                      uint32_t logical_tile_bytes, TimePoint now);
  // The holder had the slot before this pool was made anew. `header` says what lies there; null:
  // nothing, or it does not know; others may have it as well. What one says holds for all. False:
  // there is no such slot, another page lies there, or the recovery has ended.
  bool Claim(HolderId holder, uint64_t slot, const std::shared_ptr<const FragmentHeader>& header,
             uint32_t logical_tile_bytes, TimePoint now);
  // The holder lets a slot go. False: it does not hold it.
  bool Release(HolderId holder, uint64_t slot);
  // Answers how many slots it held.
  size_t ReleaseAll(HolderId holder);
  // The same of all but those slots.
  size_t ReleaseAllBut(HolderId holder, std::span<const uint64_t> kept);
  size_t HeldBy(HolderId holder) const;
  size_t held() const { return held_; }
  size_t blank() const { return blank_; }

  // Chooses a page to leave and refers to it until EndDeparture: the one before `child`, which
  // leaves already, unless it is in use or was read later; else as the policy says.
  std::optional<PageHandle> BeginDeparture(PageHandle child, TimePoint now);
  enum class Departed { kGone, kStays };
  void EndDeparture(PageHandle page, Departed departed, TimePoint now);
  // The page's fragments are copied away by `holder`; its departure ends with that.
  std::vector<DemotionWork> Demote(PageHandle page, HolderId holder);
  // Takes Demote back; the departure goes on. False: it has ended.
  bool ForgetDemotion(PageHandle page, HolderId holder);
  // What the holder copies from that slot; none: nothing.
  std::optional<FragmentMeta> DemotingAt(HolderId holder, uint64_t slot) const;
  // The holder has done with a slot of such a page. False: it is none. The page goes with its last,
  // unless somebody uses it again.
  bool Demoted(HolderId holder, uint64_t slot, TimePoint now);
  // Pages that the holder was to copy and will not; they go. Answers how many slots.
  size_t DropDemotions(HolderId holder, TimePoint now);
  size_t demoting() const { return demoting_.size(); }

  std::shared_ptr<const FragmentHeader> HeaderAt(const Slot& slot) const {
    return headers_[slots_.NumberOf(slot)];
  }
  // Of the page in a slot that is taken, also of one that was removed and is in use still. Null:
  // there is no such slot, or no page in it.
  std::shared_ptr<const FragmentHeader> PageAt(uint64_t slot) const;
  // Removes the page `key` that has a fragment in the slot, whose bytes are damaged. False: there
  // is none.
  bool Withdraw(uint64_t slot, const PageKey& key, TimePoint now);

 private:
  struct Demoting {
    PageHandle page = kNoPage;
    HolderId by = 0;
  };
  std::optional<PageHandle> ParentToLeave(PageHandle child, TimePoint now) const;

  void LetGo(uint64_t slot);
  void Keep(HolderId holder, uint64_t slot);
  bool Holds(HolderId holder, uint64_t slot) const;
  // How many hold the blank slot.
  size_t HoldersOf(uint64_t blank) const;
  absl::StatusOr<PageHandle> Insert(uint64_t slot,
                                    const std::shared_ptr<const FragmentHeader>& header,
                                    uint32_t logical_tile_bytes, TimePoint now);

  UniformSlots slots_;
  PageTable table_;
  bool recovering_;
  absl::flat_hash_map<HolderId, absl::flat_hash_set<uint64_t>> holds_;  // slots
  size_t held_ = 0;                                                     // holds of any kind
  size_t blank_ = 0;                                  // slots that are held without a page
  absl::flat_hash_map<uint64_t, size_t> shared_;      // holders of such a slot, if several
  absl::flat_hash_map<uint64_t, Demoting> demoting_;  // by slot
  absl::flat_hash_set<PageHandle> leaving_;           // between BeginDeparture and its end
  std::vector<std::shared_ptr<const FragmentHeader>> headers_;  // by slot, of the last fragment
  std::vector<PageHandle> pages_;  // by slot, for one that is taken; kNoPage: blank
};

}  // namespace crumb::storage
