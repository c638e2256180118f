// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/roster.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "common/errno_status.h"
#include "common/mapping.h"
#include "common/status_macros.h"

namespace crumb {
namespace {

constexpr int kAttemptsMax = 8;  // to find a byte that is not taken, of 2^62
constexpr off_t kLastByte = (off_t{1} << 62) - 1;

constexpr size_t kEpochAt = kRosterSlotsMax / 8;
constexpr size_t kRosterBytes = kEpochAt + sizeof(uint64_t);

struct Range {
  off_t first = 0;
  off_t last = 0;  // inclusive
};

// Opens the same file again: locks belong to an open file, and a descriptor that came from another
// process shares that process's. Fails at once for files that are not in memory, and for those with
// a lease that opening would break.
absl::StatusOr<UniqueFd> OpenAgain(int roster) {
  if (::fcntl(roster, F_GET_SEALS) < 0) return absl::DataLossError("not a roster");
  UniqueFd file(
      ::open(("/proc/self/fd/" + std::to_string(roster)).c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return ErrnoStatus(errno, "opening a roster");
  return file;
}

}  // namespace

absl::StatusOr<UniqueFd> CreateRoster() {
  CRUMB_ASSIGN_OR_RETURN(UniqueFd roster, CreateMemfd("crumb-roster", kRosterBytes));
  // A file that cannot shrink can be mapped without the risk of a SIGBUS.
  if (::fcntl(roster.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return ErrnoStatus(errno, "sealing a roster");
  }
  // Workers that run as other users open it again, to lock bytes of their own. It holds no bytes of
  // pages.
  if (::fchmod(roster.get(), 0666) != 0) return ErrnoStatus(errno, "fchmod of a roster");
  return roster;
}

absl::StatusOr<UniqueFd> AdoptRoster(int roster) {
  CRUMB_ASSIGN_OR_RETURN(UniqueFd file, OpenAgain(roster));
  CRUMB_RETURN_IF_ERROR(ReadOwnRoster(file.get()).status());
  return file;
}

absl::StatusOr<std::vector<uint64_t>> ReadOwnRoster(int roster) {
  // The kernel names any lock in a range, not the first: the parts on both sides of it are looked
  // at next.
  std::vector<uint64_t> marks;
  std::vector<Range> unknown = {{0, kLastByte}};
  while (!unknown.empty()) {
    const Range range = unknown.back();
    unknown.pop_back();
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = range.first;
    lock.l_len = range.last - range.first + 1;
    if (::fcntl(roster, F_OFD_GETLK, &lock) != 0) return ErrnoStatus(errno, "reading a roster");
    if (lock.l_type == F_UNLCK) continue;
    if (lock.l_len != 1) return absl::DataLossError("a roster is locked by more than bytes");
    if (marks.size() == kRosterMarksMax) {
      return absl::DataLossError("a roster has more than " + std::to_string(kRosterMarksMax) +
                                 " marks");
    }
    marks.push_back(static_cast<uint64_t>(lock.l_start));
    if (lock.l_start > range.first) unknown.push_back({range.first, lock.l_start - 1});
    if (lock.l_start < range.last) unknown.push_back({lock.l_start + 1, range.last});
  }
  std::sort(marks.begin(), marks.end());
  return marks;
}

absl::StatusOr<SlotMarks> SlotMarks::Map(int roster) {
  const int seals = ::fcntl(roster, F_GET_SEALS);
  struct stat file = {};
  struct statfs system = {};
  if (seals < 0 || ::fstat(roster, &file) != 0 || ::fstatfs(roster, &system) != 0) {
    return absl::DataLossError("not a roster");
  }
  // Files in huge pages, which can run out, have another type.
  const bool safe = (seals & F_SEAL_SHRINK) != 0 &&
                    file.st_size >= static_cast<off_t>(kRosterBytes) &&
                    system.f_type == TMPFS_MAGIC;
  if (!safe) return absl::DataLossError("a roster without bits for slots");
  CRUMB_ASSIGN_OR_RETURN(Mapping mapping,
                         Mapping::Of(roster, kRosterBytes, Mapping::Access::kReadWrite));
  return SlotMarks(std::move(mapping));
}

void SlotMarks::Set(uint64_t slot) {
  if (slot < kRosterSlotsMax) mapping_.bytes()[slot / 8] |= std::byte{1} << (slot % 8);
}

void SlotMarks::Clear(uint64_t slot) {
  if (slot < kRosterSlotsMax) mapping_.bytes()[slot / 8] &= ~(std::byte{1} << (slot % 8));
}

bool SlotMarks::Has(uint64_t slot) const {
  if (slot >= kRosterSlotsMax) return true;
  return (mapping_.bytes()[slot / 8] >> (slot % 8) & std::byte{1}) != std::byte{0};
}

uint64_t SlotMarks::epoch() const {
  uint64_t epoch;
  std::memcpy(&epoch, mapping_.bytes().data() + kEpochAt, sizeof(epoch));
  return epoch;
}

void SlotMarks::SetEpoch(uint64_t epoch) {
  std::memcpy(mapping_.bytes().data() + kEpochAt, &epoch, sizeof(epoch));
}

absl::StatusOr<RosterMark> RosterMark::Take(int roster) {
  CRUMB_ASSIGN_OR_RETURN(UniqueFd file, OpenAgain(roster));
  std::random_device seed;
  std::mt19937_64 random((uint64_t{seed()} << 32) | seed());
  for (int attempt = 0; attempt < kAttemptsMax; ++attempt) {
    const uint64_t byte = random() >> 2;
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(byte);
    lock.l_len = 1;
    if (::fcntl(file.get(), F_OFD_SETLK, &lock) == 0) return RosterMark(std::move(file), byte);
    if (errno != EAGAIN && errno != EACCES) return ErrnoStatus(errno, "marking a roster");
  }
  return absl::ResourceExhaustedError("a roster has no byte left to mark");
}

}  // namespace crumb
