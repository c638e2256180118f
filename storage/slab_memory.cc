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

// All bytes are there on return: a later shortage would be a signal instead of a status.
absl::StatusOr<UniqueFd> CreateFilled(const std::string& name, uint64_t bytes, bool huge_pages) {
  if (huge_pages && bytes % kHugePageBytes == 0) {
    absl::StatusOr<UniqueFd> huge = CreateHuge(name, bytes);
    if (huge.ok()) return huge;
    LogWarning("host tier: {}; going on with pages of the normal size",
               std::string(huge.status().message()));
  }
  CRUMB_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd(name, bytes));
  if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    return absl::ResourceExhaustedError(
        "no " + std::to_string(bytes) + " bytes of memory for " + name +
        ": lower host.bytes_max (" + std::string(ErrnoStatus(errno, "fallocate").message()) + ")");
  }
  return fd;
}

}  // namespace

absl::StatusOr<SlabMemory::Memory> SlabMemory::OpenSlab(size_t number, uint64_t bytes,
                                                        bool huge_pages) {
  Memory memory;
  CRUMB_ASSIGN_OR_RETURN(memory.fd,
                         CreateFilled("crumb-slab-" + std::to_string(number), bytes, huge_pages));
  CRUMB_ASSIGN_OR_RETURN(memory.mapping,
                         Mapping::Of(memory.fd.get(), bytes, Mapping::Access::kReadWrite));
  // Page table entries, too, so that no commit pays for the first touch.
  if (::madvise(memory.mapping.data(), bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    return absl::ResourceExhaustedError(
        "filling a slab of host memory failed: lower host.bytes_max");
  }
  // A mapping that is writable already stays so; nobody can make another.
  if (::fcntl(memory.fd.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) !=
      0) {
    return ErrnoStatus(errno, "sealing a slab of host memory");
  }
  return memory;
}

absl::StatusOr<std::unique_ptr<SlabMemory>> SlabMemory::Open(const HostOptions& options) {
  constexpr uint64_t kUnit = SlotAllocator::kChunkBytesMin;
  const uint64_t total = options.bytes_max.value / kUnit * kUnit;
  const uint64_t slab_bytes = options.slab_bytes.value / kUnit * kUnit;
  if (total == 0 || slab_bytes == 0) {
    return absl::InvalidArgumentError("host.bytes_max and host.slab_bytes must be 1 MiB or more");
  }
  auto memory = std::make_unique<SlabMemory>();
  for (uint64_t left = total; left > 0;) {
    const uint64_t bytes = std::min(left, slab_bytes);
    CRUMB_ASSIGN_OR_RETURN(Memory slab, OpenSlab(memory->slabs_.size(), bytes, options.huge_pages));
    memory->slabs_.push_back(std::move(slab));
    left -= bytes;
  }
  return memory;
}

std::vector<Slab> SlabMemory::slabs() const {
  std::vector<Slab> slabs;
  for (const Memory& memory : slabs_) slabs.push_back({memory.fd.get(), memory.mapping.size()});
  return slabs;
}

}  // namespace crumb::storage
