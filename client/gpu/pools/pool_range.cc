// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/pools/pool_range.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<PoolRange>> PoolRange::Open(const PoolRangeOptions& options,
                                                           DeviceMemory& memory, PoolLink& link) {
  CRUMB_ASSIGN_OR_RETURN(auto range, memory.Reserve(options.range_bytes));
  return std::unique_ptr<PoolRange>(new PoolRange(options, memory, link, std::move(range)));
}

PoolRange::PoolRange(const PoolRangeOptions& options, DeviceMemory& memory, PoolLink& link,
                     std::unique_ptr<DeviceRange> range)
    : options_(options),
      memory_(memory),
      link_(link),
      per_handle_(options.handle_bytes / options.slot_bytes),
      range_(std::move(range)) {}

size_t PoolRange::handles() const {
  MutexLock lock(&mutex_);
  return handles_.size();
}

bool PoolRange::Contains(uint32_t number) const {
  MutexLock lock(&mutex_);
  return handles_.contains(number);
}

absl::Status PoolRange::Map(uint32_t number, std::unique_ptr<DeviceHandle> handle) {
  const uint64_t offset = uint64_t{number} * options_.handle_bytes;
  CRUMB_RETURN_IF_ERROR(range_->Map(offset, *handle));
  handles_.emplace(number, std::move(handle));
  uint32_t end = mapped_end_.load(std::memory_order_relaxed);
  while (handles_.contains(end)) ++end;
  mapped_end_.store(end, std::memory_order_release);
  return absl::OkStatus();
}

absl::Status PoolRange::MapAll(std::vector<PoolHandle> handles) {
  MutexLock lock(&mutex_);
  for (PoolHandle& one : handles) {
    if (handles_.contains(one.number)) continue;
    CRUMB_ASSIGN_OR_RETURN(auto handle, memory_.Import(std::move(one.fd), options_.handle_bytes));
    CRUMB_RETURN_IF_ERROR(Map(one.number, std::move(handle)));
  }
  return absl::OkStatus();
}

absl::Status PoolRange::Reach(PoolSession* session, uint64_t slot) {
  if (slot / per_handle_ >= options_.range_bytes / options_.handle_bytes) {
    return absl::NotFoundError("the pool has no slot " + std::to_string(slot));
  }
  const auto number = static_cast<uint32_t>(slot / per_handle_);
  if (number < mapped_end_.load(std::memory_order_acquire)) return absl::OkStatus();
  if (Contains(number)) return absl::OkStatus();
  if (session == nullptr) return absl::UnavailableError("the device pool is not joined");
  CRUMB_ASSIGN_OR_RETURN(std::vector<PoolHandle> handles, session->Handles(number));
  CRUMB_RETURN_IF_ERROR(MapAll(std::move(handles)));
  if (Contains(number)) return absl::OkStatus();
  return absl::NotFoundError("the pool has no handle " + std::to_string(number));
}

absl::Status PoolRange::OfferAll(PoolSession& session, std::span<const PoolHandle> there) {
  MutexLock lock(&mutex_);
  for (const auto& [number, handle] : handles_) {
    const bool known = std::any_of(there.begin(), there.end(), [number = number](const auto& one) {
      return one.number == number;
    });
    if (known) continue;
    CRUMB_ASSIGN_OR_RETURN(const UniqueFd fd, handle->Export());
    absl::Status offered = session.OfferAgain(fd.get(), number);
    if (!offered.ok() && !absl::IsAlreadyExists(offered)) return offered;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DeviceHandle>> PoolRange::AllocateHandle() {
  auto handle = memory_.Allocate(options_.handle_bytes);
  if (!absl::IsResourceExhausted(handle.status())) return handle;
  // Unused pools may occupy the memory.
  const auto freed = link_.Reclaim(memory_.uuid(), options_.handle_bytes);
  if (!freed.ok() || *freed == 0) return handle;
  return memory_.Allocate(options_.handle_bytes);
}

bool PoolRange::Grow(PoolSession& session) {
  while ((handles() + 1) * options_.handle_bytes <= options_.bytes_max) {
    auto handle = AllocateHandle();
    if (!handle.ok()) {
      LogWarning("a device pool stays smaller than wanted: {}", handle.status().ToString());
      return false;
    }
    const auto fd = (*handle)->Export();
    const auto number = fd.ok() ? session.Offer(fd->get(), options_.bytes_max)
                                : absl::StatusOr<uint32_t>(fd.status());
    if (!number.ok()) {
      const bool others_did = absl::IsResourceExhausted(number.status());
      if (!others_did && !absl::IsUnavailable(number.status())) {
        LogWarning("crumbd did not take device memory: {}", number.status().ToString());
      }
      return true;
    }
    MutexLock lock(&mutex_);
    const absl::Status mapped = Map(*number, *std::move(handle));
    if (!mapped.ok()) {
      LogWarning("device memory cannot be mapped: {}", mapped.ToString());
      return false;
    }
  }
  return true;
}

}  // namespace crumb::client
