// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host/slab_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "common/errno_status.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/slot_allocator.h"

namespace crumb::storage {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
constexpr uint64_t kUnitBytes = SlotAllocator::kChunkBytesMin;
// Readers' descriptors could be opened again through /proc: only this process's user may, and only
// for reading.
constexpr mode_t kSlabMode = 0400;

absl::StatusOr<UniqueFd> CreateHuge(const std::string& name, uint64_t bytes) {
  UniqueFd fd(
      ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | MFD_HUGE_2MB));
  if (!fd.valid()) return ErrnoStatus(errno, "memfd_create " + name + " with huge pages");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(errno, "taking huge pages for " + name);
  }
  return fd;
}

// A later shortage would be a signal instead of a status, so bytes are there before they are used;
// page table entries, too, so that no commit pays for the first touch.
absl::Status Take(int fd, const Mapping& mapping, uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  if (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    return absl::ResourceExhaustedError(
        "no " + std::to_string(bytes) + " bytes of memory for a slab: lower host.bytes_max (" +
        std::string(ErrnoStatus(errno, "fallocate").message()) + ")");
  }
  if (::madvise(mapping.data() + offset, bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    return absl::ResourceExhaustedError(
        "filling a slab of host memory failed: lower host.bytes_max");
  }
  return absl::OkStatus();
}

// Ends the mapping and keeps its addresses, so that no other mapping can come to lie there.
absl::Status Unmap(const Mapping& mapping) {
  if (::mmap(mapping.data(), mapping.size(), PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return ErrnoStatus(errno, "unmapping a slab");
  }
  return absl::OkStatus();
}

// Makes `to` another descriptor of the file of `from`.
absl::Status Replace(const UniqueFd& from, const UniqueFd& to) {
  if (::dup3(from.get(), to.get(), O_CLOEXEC) < 0) {
    return ErrnoStatus(errno, "replacing a slab's descriptor");
  }
  return absl::OkStatus();
}

std::string NameOf(size_t slab) { return "crumb-slab-" + std::to_string(slab); }

}  // namespace

absl::StatusOr<UniqueFd> OpenSlabReader(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  UniqueFd again(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!again.valid()) return ErrnoStatus(errno, "opening a slab again at " + path);
  return again;
}

absl::StatusOr<bool> TakeSlabLease(int reader) {
  // A process that opens the file while the lease is held makes the kernel signal this one, with
  // SIGIO unless another signal is set, and SIGIO ends a process. SIGURG is ignored by default.
  if (::fcntl(reader, F_SETSIG, SIGURG) == 0 && ::fcntl(reader, F_SETLEASE, F_WRLCK) == 0) {
    return true;
  }
  if (errno == EAGAIN) return false;
  return absl::UnimplementedError(
      "the kernel cannot report which processes map a slab (" +
      std::string(ErrnoStatus(errno, "F_SETLEASE of a memory file").message()) + ")");
}

void DropSlabLease(int reader) { ::fcntl(reader, F_SETLEASE, F_UNLCK); }

absl::Status EmptySlab(const Mapping& mapping, int fd) {
  CRUMB_RETURN_IF_ERROR(Unmap(mapping));
  if (::ftruncate(fd, 0) != 0) return ErrnoStatus(errno, "giving a slab's memory back");
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> SlabMemory::OpenReader(size_t slab) const {
  return OpenSlabReader(slabs_[slab].file.get());
}

absl::StatusOr<SlabMemory::File> SlabMemory::MakeFile(size_t slab, bool may_be_huge) const {
  File made;
  if (may_be_huge && huge_pages_ && slab_bytes_ % kHugePageBytes == 0) {
    absl::StatusOr<UniqueFd> huge = CreateHuge(NameOf(slab), slab_bytes_);
    if (huge.ok()) {
      made = {*std::move(huge), true};
    } else {
      LogWarning("host tier: {}; going on with pages of the normal size",
                 std::string(huge.status().message()));
    }
  }
  if (!made.fd.valid()) {
    CRUMB_ASSIGN_OR_RETURN(made.fd, CreateMemfd(NameOf(slab), slab_bytes_));
  }
  if (::fchmod(made.fd.get(), kSlabMode) != 0) return ErrnoStatus(errno, "fchmod of a slab");
  return made;
}

absl::Status SlabMemory::Seal(int fd) const {
  // The mapping that is writable already stays so; no process can make another.
  const int shrink = sharing_ == Sharing::kFixed ? F_SEAL_SHRINK : 0;
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_FUTURE_WRITE | shrink) != 0) {
    return ErrnoStatus(errno, "sealing a slab of host memory");
  }
  return absl::OkStatus();
}

absl::Status SlabMemory::AddSlab(uint64_t wanted_bytes) {
  CRUMB_ASSIGN_OR_RETURN(File made, MakeFile(slabs_.size(), /*may_be_huge=*/true));
  Memory memory;
  memory.file = std::move(made.fd);
  CRUMB_ASSIGN_OR_RETURN(memory.mapping,
                         Mapping::Of(memory.file.get(), slab_bytes_, Mapping::Access::kReadWrite));
  CRUMB_RETURN_IF_ERROR(Seal(memory.file.get()));
  CRUMB_ASSIGN_OR_RETURN(memory.reader, OpenSlabReader(memory.file.get()));
  slabs_.push_back(std::move(memory));
  MutexLock lock(&mutex_);
  states_.push_back({.taken_bytes = made.huge ? wanted_bytes : 0, .wanted_bytes = wanted_bytes});
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SlabMemory>> SlabMemory::Open(const HostOptions& options,
                                                             uint64_t first_bytes,
                                                             Sharing sharing) {
  auto memory = std::make_unique<SlabMemory>();
  memory->total_bytes_ = options.bytes_max.value / kUnitBytes * kUnitBytes;
  memory->slab_bytes_ =
      std::min(options.slab_bytes.value / kUnitBytes * kUnitBytes, memory->total_bytes_);
  memory->huge_pages_ = options.huge_pages;
  memory->sharing_ = sharing;
  if (memory->slab_bytes_ == 0) {
    return absl::InvalidArgumentError("host.bytes_max and host.slab_bytes must be 1 MiB or more");
  }
  CRUMB_ASSIGN_OR_RETURN(memory->nothing_, CreateMemfd("crumb-slab-dropped", memory->slab_bytes_));
  if (sharing == Sharing::kByTenant) {
    CRUMB_ASSIGN_OR_RETURN(const UniqueFd reader, OpenSlabReader(memory->nothing_.get()));
    CRUMB_RETURN_IF_ERROR(TakeSlabLease(reader.get()).status());
  }
  for (uint64_t left = memory->total_bytes_; left > 0;) {
    const uint64_t wanted = std::min(left, memory->slab_bytes_);
    CRUMB_RETURN_IF_ERROR(memory->AddSlab(wanted));
    left -= wanted;
  }
  while (memory->missing_bytes() > 0) {
    const uint64_t taken = memory->total_bytes_ - memory->missing_bytes();
    if (first_bytes < taken + kUnitBytes) break;
    CRUMB_RETURN_IF_ERROR(memory->Grow(first_bytes - taken).status());
  }
  return memory;
}

uint64_t SlabMemory::bytes(size_t slab) const {
  MutexLock lock(&mutex_);
  return states_[slab].taken_bytes;
}

uint64_t SlabMemory::missing_bytes() const {
  MutexLock lock(&mutex_);
  uint64_t missing = 0;
  for (const State& state : states_) missing += state.wanted_bytes - state.taken_bytes;
  return missing;
}

bool SlabMemory::dropped(size_t slab) const {
  MutexLock lock(&mutex_);
  return states_[slab].phase == State::Phase::kDropped;
}

void SlabMemory::SetPhase(size_t slab, State::Phase phase) {
  MutexLock lock(&mutex_);
  states_[slab].phase = phase;
}

absl::StatusOr<size_t> SlabMemory::Grow(uint64_t bytes) {
  size_t slab = 0;
  uint64_t taken = 0;
  uint64_t more = 0;
  {
    MutexLock lock(&mutex_);
    while (slab < states_.size() && states_[slab].taken_bytes == states_[slab].wanted_bytes) ++slab;
    if (slab == states_.size()) return absl::OutOfRangeError("all of host.bytes_max is taken");
    State& state = states_[slab];
    if (state.phase == State::Phase::kChanging) {
      return absl::ResourceExhaustedError("a slab is being renewed: try again");
    }
    taken = state.taken_bytes;
    more = std::min(bytes / kUnitBytes * kUnitBytes, state.wanted_bytes - taken);
    if (more == 0) return slab;
    if (state.phase == State::Phase::kDropped) {  // Renew allocates it
      state.taken_bytes += more;
      return slab;
    }
    state.phase = State::Phase::kGrowing;
  }
  const absl::Status there = Take(slabs_[slab].file.get(), slabs_[slab].mapping, taken, more);
  MutexLock lock(&mutex_);
  states_[slab].phase = State::Phase::kThere;
  CRUMB_RETURN_IF_ERROR(there);
  states_[slab].taken_bytes += more;
  return slab;
}

SlabMemory::Drop SlabMemory::TryDrop(size_t slab) {
  {
    MutexLock lock(&mutex_);
    if (states_[slab].phase == State::Phase::kDropped) return Drop::kDropped;
    if (states_[slab].phase != State::Phase::kThere) return Drop::kHeld;
    states_[slab].phase = State::Phase::kChanging;
  }
  const Memory& memory = slabs_[slab];
  const absl::StatusOr<bool> alone = TakeSlabLease(memory.reader.get());
  if (!alone.ok() || !*alone) {
    SetPhase(slab, State::Phase::kThere);
    return Drop::kHeld;
  }
  // No other descriptor or mapping exists, and none can be made while the lease is held. References
  // to single pages may remain: before the kernel seals a file against writing, it checks each page
  // for references that it cannot account for.
  absl::Status done = Unmap(memory.mapping);
  const bool free = done.ok() && ::fcntl(memory.file.get(), F_ADD_SEALS, F_SEAL_WRITE) == 0;
  if (free) done = EmptySlab(memory.mapping, memory.file.get());
  if (free && done.ok()) done = Detach(slab);  // ends the lease
  if (free && done.ok()) {
    SetPhase(slab, State::Phase::kDropped);
    return Drop::kDropped;
  }
  if (!done.ok()) LogError("host tier: {}", done.ToString());
  DropSlabLease(memory.reader.get());
  SetPhase(slab, State::Phase::kThere);
  return Drop::kPinned;
}

absl::Status SlabMemory::Revoke(size_t slab) {
  {
    MutexLock lock(&mutex_);
    if (states_[slab].phase == State::Phase::kDropped) return absl::OkStatus();
    if (states_[slab].phase != State::Phase::kThere) {
      return absl::UnavailableError("the slab is being changed: try again");
    }
    states_[slab].phase = State::Phase::kChanging;
  }
  absl::Status done = EmptySlab(slabs_[slab].mapping, slabs_[slab].file.get());
  if (done.ok()) done = Detach(slab);
  SetPhase(slab, done.ok() ? State::Phase::kDropped : State::Phase::kThere);
  return done;
}

absl::Status SlabMemory::Detach(size_t slab) {
  CRUMB_RETURN_IF_ERROR(Replace(nothing_, slabs_[slab].file));
  return Replace(nothing_, slabs_[slab].reader);
}

absl::Status SlabMemory::Renew(size_t slab, const std::function<bool(uint64_t bytes)>& may_take) {
  uint64_t taken = 0;
  {
    MutexLock lock(&mutex_);
    State& state = states_[slab];
    if (state.phase != State::Phase::kDropped) {
      return absl::FailedPreconditionError("only a dropped slab can be renewed");
    }
    state.phase = State::Phase::kChanging;
    taken = state.taken_bytes;
  }
  const absl::Status done = PutFile(slab, taken, may_take);
  if (!done.ok()) Unmap(slabs_[slab].mapping).IgnoreError();
  SetPhase(slab, done.ok() ? State::Phase::kThere : State::Phase::kDropped);
  return done;
}

absl::Status SlabMemory::PutFile(size_t slab, uint64_t taken,
                                 const std::function<bool(uint64_t bytes)>& may_take) {
  const Memory& memory = slabs_[slab];
  // Huge pages need an address that is a multiple of their size.
  const bool aligned = reinterpret_cast<uintptr_t>(memory.mapping.data()) % kHugePageBytes == 0;
  CRUMB_ASSIGN_OR_RETURN(const File made, MakeFile(slab, aligned));
  if (!made.huge && !may_take(taken)) {
    return absl::ResourceExhaustedError(
        "the memory of a slab that was given up has not come back: processes pin its pages");
  }
  if (::mmap(memory.mapping.data(), slab_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             made.fd.get(), 0) == MAP_FAILED) {
    return ErrnoStatus(errno, "mapping a fresh slab");
  }
  if (!made.huge) CRUMB_RETURN_IF_ERROR(Take(made.fd.get(), memory.mapping, 0, taken));
  CRUMB_RETURN_IF_ERROR(Seal(made.fd.get()));
  CRUMB_ASSIGN_OR_RETURN(const UniqueFd reader, OpenSlabReader(made.fd.get()));
  CRUMB_RETURN_IF_ERROR(Replace(made.fd, memory.file));
  return Replace(reader, memory.reader);
}

std::vector<Slab> SlabMemory::slabs() const {
  std::vector<Slab> slabs;
  for (const Memory& memory : slabs_) slabs.push_back({memory.reader.get(), memory.mapping.size()});
  return slabs;
}

}  // namespace crumb::storage
