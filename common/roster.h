// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"

// A list of processes that the kernel keeps: a memory file in which every process that uses
// something has locked a byte of its own. Locks end with their process, and whoever has the file
// sees them, also after everybody else was restarted.
namespace crumb {

inline constexpr size_t kRosterMarksMax = 4096;  // more is no roster

absl::StatusOr<UniqueFd> CreateRoster();
// A roster that came from another process, in an open file of this one's own: a descriptor of the
// other's would keep its mark after its end. `roster` stays the caller's. kDataLoss as ReadRoster.
absl::StatusOr<UniqueFd> AdoptRoster(int roster);

// The locked bytes, ascending. kDataLoss: not a roster, or more marks than there can be processes.
absl::StatusOr<std::vector<uint64_t>> ReadRoster(int roster);

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

  UniqueFd file_;  // opened anew: the lock belongs to it
  uint64_t byte_ = 0;
};

}  // namespace crumb
