// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mapping.h"
#include "common/unique_fd.h"

// A list of processes that the kernel keeps: a memory file in which every process that uses
// something has locked a byte of its own. A lock ends with its process. Every process that has the
// file sees the locks, and so does one that gets it after all the others were restarted.
//
// A roster may come from a process that is not trusted. Only memory files are opened, which
// F_GET_SEALS reports without waiting, and they are opened with O_NONBLOCK: a lease (F_SETLEASE) on
// the file makes the call fail with kUnavailable instead of holding it up. Reading takes time in
// the number of locks, which that process chooses, so callers hold no lock meanwhile.
namespace crumb {

inline constexpr size_t kRosterMarksMax = 4096;  // more is no roster
// Slots of a pool for which a roster has a bit (SlotMarks): 1 MiB of memory at most with the epoch
// behind them, of which only those 4 KiB pages exist that have a bit set. Eight times the default
// of device_pools.slots_max.
inline constexpr uint64_t kRosterSlotsMax = (uint64_t{1} << 23) - 64;

absl::StatusOr<UniqueFd> CreateRoster();
// Opens a roster that came from another process as an open file of this process's own: a descriptor
// of the other's open file would keep its mark after its end. `roster` stays the caller's.
// kDataLoss: not a roster, or more marks than there can be processes; kUnavailable: a process has a
// lease on the file.
absl::StatusOr<UniqueFd> AdoptRoster(int roster);

// Returns the locked bytes, ascending, of a file that CreateRoster or AdoptRoster returned. A mark
// that was taken through the same open file is not seen. kDataLoss: not a roster, or more marks
// than there can be processes.
absl::StatusOr<std::vector<uint64_t>> ReadOwnRoster(int roster);

// One bit for each slot of a device pool, in the memory of the pool's roster: whether the page in
// the slot was removed while processes went on using the slot. It lives as long as any process has
// the roster, so a crumbd that is started again and takes slots over from those processes knows
// which pages must not be served any more.
//
// A roster that came from a process may be no memory of the right kind. Of a file that can shrink,
// is too short, or is not in plain memory, nothing is mapped: reading it could end this process.
// Processes of the pool can change the bits, but they are those whose pages these are. Not
// thread-safe.
class SlotMarks {
 public:
  // Maps the bits of a roster that CreateRoster or AdoptRoster returned, which stays the caller's.
  // kDataLoss: the file cannot be mapped safely.
  static absl::StatusOr<SlotMarks> Map(int roster);

  void Set(uint64_t slot);
  void Clear(uint64_t slot);
  // True for a slot that has no bit, too.
  bool Has(uint64_t slot) const;

  // A number that lives as long as the marks: storage::DeletionEpochs. 0 in a new roster.
  uint64_t epoch() const;
  void SetEpoch(uint64_t epoch);

 private:
  explicit SlotMarks(Mapping mapping) : mapping_(std::move(mapping)) {}

  Mapping mapping_;
};

// A process's mark, until it is destroyed or the process ends. Move-only.
class RosterMark {
 public:
  RosterMark() = default;
  // Marks this process at a random byte. `roster` stays the caller's.
  static absl::StatusOr<RosterMark> Take(int roster);

  uint64_t byte() const { return byte_; }
  // A descriptor of the roster; -1: none was taken.
  int roster() const { return file_.get(); }

 private:
  RosterMark(UniqueFd file, uint64_t byte) : file_(std::move(file)), byte_(byte) {}

  UniqueFd file_;  // an open file of its own, because the lock belongs to it
  uint64_t byte_ = 0;
};

}  // namespace crumb
