// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host/inherited_slabs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "common/errno_status.h"
#include "common/status_macros.h"
#include "storage/host/slab_memory.h"

namespace crumb::storage {
namespace {

constexpr int kSeals = F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
constexpr mode_t kOthers = 0077;

// A file that another user could shrink would end this process at a read; a file that is written to
// would serve unchecked bytes. Sets *shrinks to whether this user can shrink it.
absl::Status CheckSlab(int fd, uint64_t bytes, bool* shrinks) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return ErrnoStatus(errno, "fstat of a slab that is handed over");
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (status.st_size < 0 || static_cast<uint64_t>(status.st_size) != bytes || seals < 0 ||
      (seals & kSeals) != kSeals ||
      ((seals & F_SEAL_SHRINK) == 0 &&
       (status.st_uid != ::geteuid() || (status.st_mode & kOthers) != 0))) {
    return absl::DataLossError("a slab that is handed over has " + std::to_string(status.st_size) +
                               " bytes and seals " + std::to_string(seals));
  }
  *shrinks = (seals & F_SEAL_SHRINK) == 0;
  return absl::OkStatus();
}

}  // namespace

absl::Status InheritedSlabs::Adopt(std::vector<UniqueFd> slabs, uint64_t slab_bytes,
                                   uint32_t first_region, std::span<const uint32_t> partitions) {
  first_region_ = first_region;
  slab_bytes_ = slab_bytes;
  CRUMB_ASSIGN_OR_RETURN(empty_file_, CreateMemfd("crumb-slab-given-up", slab_bytes));
  for (UniqueFd& fd : slabs) {
    Inherited slab;
    CRUMB_RETURN_IF_ERROR(CheckSlab(fd.get(), slab_bytes, &slab.shrinks));
    CRUMB_ASSIGN_OR_RETURN(slab.reader, OpenSlabReader(fd.get()));
    CRUMB_ASSIGN_OR_RETURN(slab.mapping,
                           Mapping::Of(fd.get(), slab_bytes, Mapping::Access::kReadOnly));
    slab.fd = std::move(fd);
    slab.partition = partitions[slabs_.size()];
    slabs_.push_back(std::move(slab));
    held_bytes_ += slab_bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> InheritedSlabs::OpenReader(uint32_t region) const {
  const Inherited& slab = slabs_[region - first_region_];
  if (!slab.held) return absl::NotFoundError("the slab was given up");
  return OpenSlabReader(slab.fd.get());
}

void InheritedSlabs::AppendTo(std::vector<Slab>& slabs) const {
  for (const Inherited& slab : slabs_) slabs.push_back({slab.reader.get(), slab_bytes_});
}

bool InheritedSlabs::Claim(const Slot& slot, uint32_t owner) {
  if (!Holds(slot.region) || slot.bytes == 0 || slot.offset > slab_bytes_ ||
      slot.bytes > slab_bytes_ - slot.offset) {
    return false;
  }
  Inherited& slab = slabs_[slot.region - first_region_];
  const auto next = slab.claimed.lower_bound(slot.offset);
  if (next != slab.claimed.end() && next->first < slot.offset + slot.bytes) return false;
  if (next != slab.claimed.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes > slot.offset) return false;
  }
  slab.claimed.emplace(slot.offset, Claimed{slot.bytes, owner});
  slab.used_bytes += slot.bytes;
  used_bytes_ += slot.bytes;
  return true;
}

void InheritedSlabs::SetOwner(const Slot& slot, uint32_t owner) {
  slabs_[slot.region - first_region_].claimed.at(slot.offset).owner = owner;
}

void InheritedSlabs::Free(const Slot& slot) {
  Inherited& slab = slabs_[slot.region - first_region_];
  slab.claimed.erase(slot.offset);
  slab.used_bytes -= slot.bytes;
  used_bytes_ -= slot.bytes;
}

std::vector<uint32_t> InheritedSlabs::Held() const {
  std::vector<uint32_t> held;
  for (uint32_t i = 0; i < slabs_.size(); ++i) {
    if (slabs_[i].held) held.push_back(first_region_ + i);
  }
  std::stable_sort(held.begin(), held.end(),
                   [this](uint32_t a, uint32_t b) { return used_bytes(a) < used_bytes(b); });
  return held;
}

std::vector<uint32_t> InheritedSlabs::OwnersIn(uint32_t region) const {
  std::vector<uint32_t> owners;
  for (const auto& [offset, claimed] : slabs_[region - first_region_].claimed) {
    owners.push_back(claimed.owner);
  }
  std::sort(owners.begin(), owners.end());
  owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
  return owners;
}

absl::Status InheritedSlabs::GiveUp(uint32_t region) {
  Inherited& slab = slabs_[region - first_region_];
  // Address and descriptor number stay taken: others read them without a lock.
  if (::mmap(slab.mapping.data(), slab_bytes_, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return ErrnoStatus(errno, "unmapping a slab");
  }
  if (slab.shrinks) {
    UniqueFd file(::fcntl(slab.fd.get(), F_DUPFD_CLOEXEC, 0));
    if (file.valid()) leaving_.push_back({.file = std::move(file), .partition = slab.partition});
  }
  for (const UniqueFd* fd : {&slab.fd, &slab.reader}) {
    if (::dup3(empty_file_.get(), fd->get(), O_CLOEXEC) < 0) {
      return ErrnoStatus(errno, "giving up a slab's descriptor");
    }
  }
  slab.held = false;
  held_bytes_ -= slab_bytes_;
  return absl::OkStatus();
}

bool InheritedSlabs::AddLeaving(UniqueFd file, uint64_t slab_bytes, uint32_t partition) {
  bool shrinks = false;
  if (!CheckSlab(file.get(), slab_bytes, &shrinks).ok() || !shrinks) return false;
  slab_bytes_ = slab_bytes;
  leaving_.push_back({.file = std::move(file), .partition = partition});
  return true;
}

SlabMemory::Drop GiveBackUnread(const UniqueFd& file) {
  const absl::StatusOr<UniqueFd> reader = OpenSlabReader(file.get());
  if (!reader.ok()) return SlabMemory::Drop::kHeld;
  const absl::StatusOr<bool> alone = TakeSlabLease(reader->get());
  // A kernel without leases cannot report whether a process reads the file: it is only closed.
  if (!alone.ok()) return SlabMemory::Drop::kDropped;
  if (!*alone) return SlabMemory::Drop::kHeld;
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0 || ::ftruncate(file.get(), 0) != 0) {
    return SlabMemory::Drop::kPinned;
  }
  return SlabMemory::Drop::kDropped;
}

}  // namespace crumb::storage
