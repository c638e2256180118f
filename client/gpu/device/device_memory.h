// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "crumb/acquire.h"

namespace crumb::client {

// An address as kernels take it; of host memory a pointer.
using DeviceAddress = uint64_t;

// Memory of a device that can be passed to other processes. The memory lives as long as anybody
// holds it: this object, a descriptor of it, an import in another process, a mapping.
class DeviceHandle {
 public:
  virtual ~DeviceHandle() = default;
  virtual uint64_t bytes() const = 0;
  // A new descriptor, the caller's. Whoever has it can read and write the memory.
  virtual absl::StatusOr<UniqueFd> Export() const = 0;
};

// A reserved range of addresses that handles are mapped into. Unmaps everything and gives the range
// back on destruction: no kernel and no copy may use it any more. Thread-safe.
class DeviceRange {
 public:
  virtual ~DeviceRange() = default;
  virtual DeviceAddress base() const = 0;
  virtual uint64_t bytes() const = 0;
  // Maps all of `handle`, for reading and writing by this device, at `offset`, a multiple of the
  // granularity, where nothing is mapped. The handle may be destroyed afterwards.
  // kInvalidArgument: the place; kResourceExhausted.
  virtual absl::Status Map(uint64_t offset, const DeviceHandle& handle) = 0;
  // Unmaps what Map put at `offset`. kNotFound: nothing.
  virtual absl::Status Unmap(uint64_t offset) = 0;
};

// Memory of one device, as far as pools need it. Thread-safe. Handles and ranges may outlive it.
class DeviceMemory {
 public:
  struct HostOptions {
    std::string name = "host";        // processes that name it alike share pools
    uint64_t bytes_max = UINT64_MAX;  // of handles that this process has allocated and still holds
  };

  // Shared memory of the host as if it were a device's: for workers without GPU, and for tests.
  static std::unique_ptr<DeviceMemory> OpenHost(const HostOptions& options);
  // CUDA device `ordinal` by the driver, which is loaded here. kUnavailable: no driver or no such
  // device; kFailedPrecondition: it cannot share memory by descriptors, or this program was built
  // without CUDA. In the library crumb::client_cuda.
  static absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCuda(int ordinal);
  // Memory of CUDA device `peer`, under its name, that device `ordinal` reads and copies over
  // NVLink or PCIe; Allocate answers kFailedPrecondition. So does this call, where the two cannot.
  static absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCudaPeer(int ordinal, int peer);

  virtual ~DeviceMemory() = default;

  virtual const DeviceUuid& uuid() const = 0;
  // Sizes of handles and offsets of mappings are multiples of it, a power of two.
  virtual uint64_t granularity() const = 0;

  // kResourceExhausted: the device has no `bytes` left; kInvalidArgument: no multiple of the
  // granularity. The content is undefined.
  virtual absl::StatusOr<std::unique_ptr<DeviceHandle>> Allocate(uint64_t bytes) = 0;
  // Takes part in memory that another process exported, of this device or of a peer. kDataLoss: not
  // such a descriptor, or smaller than `bytes`.
  virtual absl::StatusOr<std::unique_ptr<DeviceHandle>> Import(UniqueFd fd, uint64_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceRange>> Reserve(uint64_t bytes) = 0;

  // Copies mapped memory to the host, behind nothing but what the device has finished; waits.
  virtual absl::Status CopyToHost(DeviceAddress from, std::span<std::byte> to) = 0;
};

}  // namespace crumb::client
