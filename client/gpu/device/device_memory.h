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

// An address in device memory as kernels take it; for host memory a pointer.
using DeviceAddress = uint64_t;

// Memory of a device that can be passed to other processes. The memory lives as long as this
// object, a descriptor of it, an import in another process, or a mapping.
class DeviceHandle {
 public:
  virtual ~DeviceHandle() = default;
  virtual uint64_t bytes() const = 0;
  // Returns a new descriptor, which the caller owns. Every process that has it can read and write
  // the memory.
  virtual absl::StatusOr<UniqueFd> Export() const = 0;
};

// A reserved address range to which handles are mapped. Its destruction unmaps everything and
// releases the range. REQUIRES: no kernel and no copy uses it then. Thread-safe.
class DeviceRange {
 public:
  virtual ~DeviceRange() = default;
  // Returns the first address, which is not accessible before a handle is mapped there.
  virtual DeviceAddress base() const = 0;
  virtual uint64_t bytes() const = 0;
  // Maps all of `handle` at `offset`, for reading and writing by this device. The handle may be
  // destroyed afterwards. kInvalidArgument: `offset` is no multiple of the granularity, or not
  // free; kResourceExhausted: there is no memory for the mapping.
  virtual absl::Status Map(uint64_t offset, const DeviceHandle& handle) = 0;
  // Unmaps the handle at `offset`. kNotFound: there is none.
  virtual absl::Status Unmap(uint64_t offset) = 0;
};

// DeviceMemory allocates and maps memory of one device for pools. Handles and ranges may outlive
// it. Thread-safe.
//
// A pool is built from it: Allocate a handle, Export its descriptor to crumbd, Import it in other
// processes, and Map it into each process's range at the handle's offset.
class DeviceMemory {
 public:
  struct HostOptions {
    std::string name = "host";  // processes that use the same name use the same pools
    // bound on the handles that this process has allocated and still holds
    uint64_t bytes_max = UINT64_MAX;
  };

  // Opens shared memory of the host in place of a device's, for workers without a GPU and for
  // tests.
  static std::unique_ptr<DeviceMemory> OpenHost(const HostOptions& options);
  // Opens memory of CUDA device `ordinal` through the driver, which is loaded here. Defined in the
  // library crumb::client_cuda. kUnavailable: there is no driver or no such device;
  // kFailedPrecondition: the device cannot pass memory by descriptors, or the program was built
  // without CUDA.
  static absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCuda(int ordinal);
  // Opens memory of CUDA device `peer`, with the peer's uuid, that device `ordinal` reads and
  // copies over NVLink or PCIe. Its Allocate returns kFailedPrecondition. kFailedPrecondition: the
  // devices do not reach each other.
  static absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCudaPeer(int ordinal, int peer);

  virtual ~DeviceMemory() = default;

  // Returns the device's uuid, the same in all processes; pools of one device are found by it.
  virtual const DeviceUuid& uuid() const = 0;
  // Sizes of handles and offsets of mappings are multiples of the granularity, a power of two.
  virtual uint64_t granularity() const = 0;

  // Allocates uninitialized memory. kResourceExhausted: the device does not have `bytes` left;
  // kInvalidArgument: `bytes` is no multiple of the granularity.
  virtual absl::StatusOr<std::unique_ptr<DeviceHandle>> Allocate(uint64_t bytes) = 0;
  // Opens memory that another process exported, of this device or of a peer. kDataLoss: the
  // descriptor is not one of device memory, or the memory is smaller than `bytes`.
  virtual absl::StatusOr<std::unique_ptr<DeviceHandle>> Import(UniqueFd fd, uint64_t bytes) = 0;
  // Reserves an address range without memory. kResourceExhausted: there is no such range.
  virtual absl::StatusOr<std::unique_ptr<DeviceRange>> Reserve(uint64_t bytes) = 0;

  // Copies mapped memory to the host and blocks until the copy is done. It does not wait for work
  // on streams.
  virtual absl::Status CopyToHost(DeviceAddress from, std::span<std::byte> to) = 0;
};

}  // namespace crumb::client
