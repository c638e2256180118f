// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/device_memory.h"
#include "client/rpc/pool_link.h"
#include "common/mutex.h"

namespace crumb::client {

// The sizes of a pool, all in bytes.
struct PoolRangeOptions {
  uint64_t slot_bytes = 0;
  uint64_t handle_bytes = 0;
  uint64_t bytes_max = 0;    // bound on the pool, including other processes' handles
  uint64_t range_bytes = 0;  // size of the address range
};

// PoolRange holds the handles of one pool, mapped into one address range of this process, so that a
// slot's number determines its address. Nothing is unmapped before destruction. Thread-safe.
//
// slot s lies at base + (s / slots per handle) * handle_bytes + (s % slots per handle) * slot_bytes
//
// Every process maps handle n at n * handle_bytes, so that slot numbers are the same for all while
// addresses differ. The range is virtual; physical memory comes with the handles.
class PoolRange {
 public:
  // Reserves the address range. `memory` and `link` are borrowed.
  static absl::StatusOr<std::unique_ptr<PoolRange>> Open(const PoolRangeOptions& options,
                                                         DeviceMemory& memory, PoolLink& link);

  DeviceAddress base() const { return range_->base(); }
  // Returns the address of a slot. It can be accessed once Reach has succeeded for the slot.
  DeviceAddress AddressOf(uint64_t slot) const {
    return range_->base() + slot / per_handle_ * options_.handle_bytes +
           slot % per_handle_ * options_.slot_bytes;
  }
  // Returns the number of mapped handles.
  size_t handles() const;

  // Maps those of crumbd's handles that are not mapped yet.
  absl::Status MapAll(std::vector<PoolHandle> handles);
  // Maps the slot's handle if it is not mapped. `session` may be null, which means that the pool is
  // not joined and no handle can be requested. kNotFound: the pool has no such slot.
  absl::Status Reach(PoolSession* session, uint64_t slot);
  // Offers crumbd, which has the handles `there`, all others that this process has.
  absl::Status OfferAll(PoolSession& session, std::span<const PoolHandle> there);
  // Adds handles until the pool has its full size or crumbd accepts no more. Returns false, and
  // logs, if the device has no memory for them.
  bool Grow(PoolSession& session);

 private:
  PoolRange(const PoolRangeOptions& options, DeviceMemory& memory, PoolLink& link,
            std::unique_ptr<DeviceRange> range);

  // Maps a handle at its place and keeps it.
  absl::Status Map(uint32_t number, std::unique_ptr<DeviceHandle> handle)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Contains(uint32_t number) const;
  // Allocates a handle; if the device is full, has crumbd give up idle pools and tries once more.
  absl::StatusOr<std::unique_ptr<DeviceHandle>> AllocateHandle();

  const PoolRangeOptions options_;
  DeviceMemory& memory_;
  PoolLink& link_;
  const uint64_t per_handle_;  // slots per handle
  const std::unique_ptr<DeviceRange> range_;
  std::atomic<uint32_t> mapped_end_{0};  // all handles below it are mapped
  mutable Mutex mutex_;                  // held while handles are imported and mapped
  std::map<uint32_t, std::unique_ptr<DeviceHandle>> handles_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::client
