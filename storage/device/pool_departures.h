// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/device/uniform_slots.h"
#include "storage/index/page_table.h"

namespace crumb::storage {

// A process that holds slots of device pools.
using HolderId = uint64_t;

// Names one departure of a page, from Begin to its end. A PageHandle is used again once its page
// has gone; the number of a departure is not.
using DepartureId = uint64_t;

// The pages of one device pool that were chosen to leave, because their slots are needed:
//
//              Begin                Demote
//   resident ---------> departing ----------> demoting
//      ^                 |  |   ^                | |
//      |  End(kStays)    |  |   '----------------' | Demoted for the last of its slots,
//      '-----------------'  |     ForgetDemotion   | DropDemotions
//                           | End(kGone)           |
//                           v                      v
//                          gone, or resident if it was leased meanwhile
//
// A departing page has a reference. A demoting one has slots that a process copies to the host
// tier: each fragment of the page is one copy. Departures are numbered, so that a call that comes
// after its departure's end does nothing. Every call costs the fragments of its page, except for
// DropDemotions, which walks over all copies, whose number the device tier bounds.
//
// A DevicePoolIndex owns it. Not thread-safe: the tier's lock covers it.
class PoolDepartures {
 public:
  struct Departure {
    PageHandle page = kNoPage;
    DepartureId id = 0;
  };
  enum class Departed { kGone, kStays };

  // Both must outlive this.
  PoolDepartures(PageTable& table, const UniformSlots& slots) : table_(table), slots_(slots) {}

  // Chooses a page to leave and refers to it until the end. That is the parent of `child`, a page
  // that is leaving, unless the parent is in use or was read later; otherwise the policy's victim.
  // Returns none while the pool recovers.
  std::optional<Departure> Begin(PageHandle child, TimePoint now);
  // Does nothing if the departure has ended.
  void End(const Departure& departure, Departed departed, TimePoint now);

  // Returns the slots that `holder` must copy; the departure ends with the last of them. Returns
  // none if the departure has ended.
  std::vector<uint64_t> Demote(const Departure& departure, HolderId holder);
  // Undoes Demote; the departure continues. Returns false if it has ended.
  bool ForgetDemotion(const Departure& departure);
  // Returns the fragment that the holder copies from that slot, if any.
  std::optional<FragmentMeta> DemotingAt(HolderId holder, uint64_t slot) const;
  // Records that the holder has copied a demoting slot. The page leaves with its last slot, unless
  // it is in use again. Returns false if the holder was not to copy that slot.
  bool Demoted(HolderId holder, uint64_t slot, TimePoint now);
  // Ends the departures of pages that the holder was to copy and will not copy: the pages are lost.
  // Returns the number of their slots.
  size_t DropDemotions(HolderId holder, TimePoint now);
  // Returns the number of slots that are being copied.
  size_t demoting() const { return demoting_.size(); }

 private:
  struct Demoting {
    Departure departure;
    HolderId by = 0;
  };

  bool Departing(const Departure& departure) const {
    const auto found = leaving_.find(departure.page);
    return found != leaving_.end() && found->second == departure.id;
  }
  std::optional<PageHandle> ParentToLeave(PageHandle child, TimePoint now) const;

  PageTable& table_;
  const UniformSlots& slots_;
  absl::flat_hash_map<uint64_t, Demoting> demoting_;      // keyed by slot
  absl::flat_hash_map<PageHandle, DepartureId> leaving_;  // departures that have not ended
  DepartureId last_departure_ = 0;
};

}  // namespace crumb::storage
