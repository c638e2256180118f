// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/slab_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>

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

constexpr uint64_t kUnitBytes = SlotAllocator::kChunkBytesMin;

// A later shortage would be a signal instead of a status, so bytes are there before they are used;
// page table entries, too, so that no commit pays for the first touch.
absl::Status Take(int fd, const Mapping& mapping, uint64_t offset, uint64_t bytes) {
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

}  // namespace

absl::StatusOr<UniqueFd> OpenSlabReader(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  UniqueFd again(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!again.valid()) return ErrnoStatus(errno, "opening a slab again at " + path);
  return again;
}

absl::StatusOr<UniqueFd> SlabMemory::OpenReader(size_t slab) const {
  return OpenSlabReader(slabs_[slab].fd.get());
}

// The kernel grants a write lease to the only reader of a file, and nobody else opened this one for
// writing: memory files are not counted as open for writing by who made them.
absl::StatusOr<bool> SlabMemory::HasReaders(size_t slab) const {
  const int probe = slabs_[slab].probe.get();
  if (::fcntl(probe, F_SETLEASE, F_WRLCK) == 0) {
    ::fcntl(probe, F_SETLEASE, F_UNLCK);
    return false;
  }
  if (errno == EAGAIN) return true;
  return absl::UnimplementedError(
      "the kernel cannot tell who maps a slab (" +
      std::string(ErrnoStatus(errno, "F_SETLEASE of a memory file").message()) + ")");
}

absl::Status SlabMemory::AddSlab(uint64_t wanted_bytes, bool huge_pages) {
  const std::string name = "crumb-slab-" + std::to_string(slabs_.size());
  Memory memory;
  memory.wanted_bytes = wanted_bytes;
  if (huge_pages && slab_bytes_ % kHugePageBytes == 0) {
    absl::StatusOr<UniqueFd> huge = CreateHuge(name, slab_bytes_);
    if (huge.ok()) {
      memory.fd = std::move(*huge);
      memory.taken_bytes = wanted_bytes;
    } else {
      LogWarning("host tier: {}; going on with pages of the normal size",
                 std::string(huge.status().message()));
    }
  }
  if (!memory.fd.valid()) {
    CRUMB_ASSIGN_OR_RETURN(memory.fd, CreateMemfd(name, slab_bytes_));
  }
  CRUMB_ASSIGN_OR_RETURN(memory.mapping,
                         Mapping::Of(memory.fd.get(), slab_bytes_, Mapping::Access::kReadWrite));
  // A mapping that is writable already stays so; nobody can make another.
  if (::fcntl(memory.fd.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) !=
      0) {
    return ErrnoStatus(errno, "sealing a slab of host memory");
  }
  if (absl::StatusOr<UniqueFd> probe = OpenSlabReader(memory.fd.get()); probe.ok()) {
    memory.probe = *std::move(probe);
  }
  slabs_.push_back(std::move(memory));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SlabMemory>> SlabMemory::Open(const HostOptions& options,
                                                             uint64_t first_bytes) {
  auto memory = std::make_unique<SlabMemory>();
  memory->total_bytes_ = options.bytes_max.value / kUnitBytes * kUnitBytes;
  memory->slab_bytes_ =
      std::min(options.slab_bytes.value / kUnitBytes * kUnitBytes, memory->total_bytes_);
  if (memory->slab_bytes_ == 0) {
    return absl::InvalidArgumentError("host.bytes_max and host.slab_bytes must be 1 MiB or more");
  }
  for (uint64_t left = memory->total_bytes_; left > 0;) {
    const uint64_t wanted = std::min(left, memory->slab_bytes_);
    CRUMB_RETURN_IF_ERROR(memory->AddSlab(wanted, options.huge_pages));
    left -= wanted;
  }
  while (memory->missing_bytes() > 0) {
    const uint64_t taken = memory->total_bytes_ - memory->missing_bytes();
    if (first_bytes < taken + kUnitBytes) break;
    CRUMB_RETURN_IF_ERROR(memory->Grow(first_bytes - taken).status());
  }
  return memory;
}

uint64_t SlabMemory::missing_bytes() const {
  uint64_t missing = 0;
  for (const Memory& memory : slabs_) missing += memory.wanted_bytes - memory.taken_bytes;
  return missing;
}

absl::StatusOr<size_t> SlabMemory::Grow(uint64_t bytes) {
  for (size_t slab = 0; slab < slabs_.size(); ++slab) {
    Memory& memory = slabs_[slab];
    if (memory.taken_bytes == memory.wanted_bytes) continue;
    const uint64_t more =
        std::min(bytes / kUnitBytes * kUnitBytes, memory.wanted_bytes - memory.taken_bytes);
    if (more > 0) {
      CRUMB_RETURN_IF_ERROR(Take(memory.fd.get(), memory.mapping, memory.taken_bytes, more));
    }
    memory.taken_bytes += more;
    return slab;
  }
  return absl::OutOfRangeError("all of host.bytes_max is taken");
}

std::vector<Slab> SlabMemory::slabs() const {
  std::vector<Slab> slabs;
  for (const Memory& memory : slabs_) slabs.push_back({memory.fd.get(), memory.mapping.size()});
  return slabs;
}

}  // namespace crumb::storage
