// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <utility>

#include "client/gpu/device/device_memory.h"
#include "common/errno_status.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "common/sha256.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// The granularity of CUDA device memory, so that code that works here works there.
constexpr uint64_t kGranularity = uint64_t{2} << 20;

// Counts the bytes that this process has allocated. It outlives the memory with its last handle.
struct Budget {
  const uint64_t bytes_max;
  std::atomic<uint64_t> used{0};

  bool Take(uint64_t bytes) {
    uint64_t now = used.load();
    do {
      if (bytes > bytes_max - now) return false;
    } while (!used.compare_exchange_weak(now, now + bytes));
    return true;
  }
};

class HostHandle final : public DeviceHandle {
 public:
  // A null `budget` means that another process allocated the memory.
  HostHandle(UniqueFd fd, uint64_t bytes, std::shared_ptr<Budget> budget)
      : fd_(std::move(fd)), bytes_(bytes), budget_(std::move(budget)) {}
  ~HostHandle() override {
    if (budget_ != nullptr) budget_->used -= bytes_;
  }

  uint64_t bytes() const override { return bytes_; }
  absl::StatusOr<UniqueFd> Export() const override {
    UniqueFd copy(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return ErrnoStatus(errno, "duplicating a descriptor of device memory");
    return copy;
  }
  int fd() const { return fd_.get(); }

 private:
  const UniqueFd fd_;
  const uint64_t bytes_;
  const std::shared_ptr<Budget> budget_;
};

class HostRange final : public DeviceRange {
 public:
  HostRange(void* base, uint64_t bytes) : base_(static_cast<std::byte*>(base)), bytes_(bytes) {}
  ~HostRange() override { ::munmap(base_, bytes_); }

  DeviceAddress base() const override { return reinterpret_cast<DeviceAddress>(base_); }
  uint64_t bytes() const override { return bytes_; }

  absl::Status Map(uint64_t offset, const DeviceHandle& handle) override {
    const uint64_t size = handle.bytes();
    if (offset % kGranularity != 0 || size > bytes_ || offset > bytes_ - size) {
      return absl::InvalidArgumentError("a mapping lies outside its range");
    }
    MutexLock lock(&mutex_);
    const auto next = mapped_.lower_bound(offset);
    const bool free_behind = next == mapped_.end() || next->first >= offset + size;
    const bool free_before =
        next == mapped_.begin() || std::prev(next)->first + std::prev(next)->second <= offset;
    if (!free_behind || !free_before) {
      return absl::InvalidArgumentError("something is mapped there");
    }
    const int fd = static_cast<const HostHandle&>(handle).fd();
    if (::mmap(base_ + offset, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
        MAP_FAILED) {
      return ErrnoStatus(errno, "mapping shared memory");
    }
    mapped_.emplace(offset, size);
    return absl::OkStatus();
  }

  absl::Status Unmap(uint64_t offset) override {
    MutexLock lock(&mutex_);
    const auto found = mapped_.find(offset);
    if (found == mapped_.end()) return absl::NotFoundError("nothing is mapped there");
    if (::mmap(base_ + offset, found->second, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
      return ErrnoStatus(errno, "unmapping shared memory");
    }
    mapped_.erase(found);
    return absl::OkStatus();
  }

 private:
  std::byte* const base_;
  const uint64_t bytes_;
  Mutex mutex_;
  std::map<uint64_t, uint64_t> mapped_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes
};

class HostDeviceMemory final : public DeviceMemory {
 public:
  explicit HostDeviceMemory(const HostOptions& options)
      : budget_(std::make_shared<Budget>(options.bytes_max)) {
    const auto digest = Sha256("crumb/host-device/" + options.name);
    std::memcpy(uuid_.bytes.data(), digest.data(), uuid_.bytes.size());
  }

  const DeviceUuid& uuid() const override { return uuid_; }
  uint64_t granularity() const override { return kGranularity; }

  absl::StatusOr<std::unique_ptr<DeviceHandle>> Allocate(uint64_t bytes) override {
    if (bytes == 0 || bytes % kGranularity != 0) {
      return absl::InvalidArgumentError("a handle's size is a multiple of the granularity");
    }
    if (!budget_->Take(bytes)) {
      return absl::ResourceExhaustedError("device memory: the bound of this process is reached");
    }
    absl::StatusOr<UniqueFd> fd = CreateMemfd("crumb-device", bytes);
    if (fd.ok() &&
        ::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      fd = ErrnoStatus(errno, "sealing device memory");
    }
    if (!fd.ok()) {
      budget_->used -= bytes;
      return fd.status();
    }
    return std::make_unique<HostHandle>(*std::move(fd), bytes, budget_);
  }

  absl::StatusOr<std::unique_ptr<DeviceHandle>> Import(UniqueFd fd, uint64_t bytes) override {
    struct stat status;
    // A file that can shrink would kill every process that reads the mapping.
    const int seals = ::fcntl(fd.get(), F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd.get(), &status) != 0 ||
        static_cast<uint64_t>(status.st_size) < bytes) {
      return absl::DataLossError("a descriptor is no device memory of this host, or too small");
    }
    return std::make_unique<HostHandle>(std::move(fd), bytes, nullptr);
  }

  absl::StatusOr<std::unique_ptr<DeviceRange>> Reserve(uint64_t bytes) override {
    if (bytes == 0 || bytes % kGranularity != 0) {
      return absl::InvalidArgumentError("a range's size is a multiple of the granularity");
    }
    void* base =
        ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return ErrnoStatus(errno, "reserving addresses");
    return std::make_unique<HostRange>(base, bytes);
  }

  absl::Status CopyToHost(DeviceAddress from, std::span<std::byte> to) override {
    std::memcpy(to.data(), reinterpret_cast<const std::byte*>(from), to.size());
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<Budget> budget_;
  DeviceUuid uuid_;
};

}  // namespace

std::unique_ptr<DeviceMemory> DeviceMemory::OpenHost(const HostOptions& options) {
  return std::make_unique<HostDeviceMemory>(options);
}

}  // namespace crumb::client
