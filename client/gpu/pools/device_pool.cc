// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/pools/device_pool.h"

#include <utility>

#include "client/gpu/pools/running_pool.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

absl::Status Validate(const DevicePoolOptions& options, const DeviceMemory& memory) {
  const uint64_t piece = memory.granularity();
  if (options.slot_bytes == 0 || options.slot_bytes % kTileAlignment != 0 ||
      options.slot_bytes > options.handle_bytes) {
    return absl::InvalidArgumentError(
        "DevicePoolOptions.slot_bytes must be a multiple of 128 and fit into handle_bytes");
  }
  if (options.handle_bytes % piece != 0 || options.range_bytes % piece != 0 ||
      options.range_bytes < options.bytes_max) {
    return absl::InvalidArgumentError(
        "DevicePoolOptions: handle_bytes and range_bytes must be multiples of the device's "
        "granularity, range_bytes no less than bytes_max");
  }
  if (options.blank_slots < 0 || (options.blank_slots == 0 && options.bytes_max > 0)) {
    return absl::InvalidArgumentError(
        "DevicePoolOptions.blank_slots must be 1 or more, or 0 without memory to give");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DevicePool>> DevicePool::Open(const DevicePoolOptions& options,
                                                             DeviceMemory& memory, Client& client) {
  CRUMB_RETURN_IF_ERROR(Validate(options, memory));
  if (client.pools() == nullptr) {
    return absl::FailedPreconditionError("device pools need a crumbd on this host");
  }
  CRUMB_ASSIGN_OR_RETURN(auto range, PoolRange::Open({.slot_bytes = options.slot_bytes,
                                                      .handle_bytes = options.handle_bytes,
                                                      .bytes_max = options.bytes_max,
                                                      .range_bytes = options.range_bytes},
                                                     memory, *client.pools()));
  auto pool = std::make_unique<RunningPool>(options, memory, client, std::move(range));
  CRUMB_RETURN_IF_ERROR(pool->Start());
  return pool;
}

}  // namespace crumb::client
