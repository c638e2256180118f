// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/launch_tables.h"

#include "common/status_macros.h"

namespace crumb::client {
namespace {

constexpr uint64_t kAlignment = 16;

}  // namespace

LaunchTable LaunchTable::At(uint64_t base, int pages, int blocks) {
  uint64_t at = base;
  const auto next = [&at]<typename T>(T** array, int count) {
    *array = reinterpret_cast<T*>(at);
    at += (sizeof(T) * static_cast<size_t>(count) + kAlignment - 1) / kAlignment * kAlignment;
  };
  LaunchTable table;
  next(&table.pages, 1);
  next(&table.tile_address, pages);
  next(&table.sequence, pages);
  next(&table.first_token, pages);
  next(&table.position_block, pages);
  next(&table.status, pages);
  next(&table.blocks, blocks);
  return table;
}

size_t LaunchTable::Bytes(int pages, int blocks) {
  const LaunchTable table = At(0, pages, blocks);
  const size_t end = reinterpret_cast<uint64_t>(table.blocks) + sizeof(int32_t) * blocks;
  return (end + kAlignment - 1) / kAlignment * kAlignment;
}

absl::StatusOr<std::unique_ptr<LaunchTables>> LaunchTables::Create(Device& device, int count,
                                                                   int pages, int blocks) {
  const size_t bytes = LaunchTable::Bytes(pages, blocks);
  std::unique_ptr<LaunchTables> tables(new LaunchTables(device, bytes));
  CRUMB_ASSIGN_OR_RETURN(tables->host_, NewPinnedBuffer(device, bytes * count));
  CRUMB_ASSIGN_OR_RETURN(tables->memory_, NewDeviceBuffer(device, bytes * count));
  for (int i = 0; i < count; ++i) {
    Slot& slot = tables->slots_.emplace_back();
    const auto host = reinterpret_cast<uint64_t>(tables->host_.get());
    slot.host = LaunchTable::At(host + bytes * i, pages, blocks);
    slot.device = LaunchTable::At(tables->memory_.get() + bytes * i, pages, blocks);
    CRUMB_ASSIGN_OR_RETURN(slot.used, NewEvent(device));
  }
  return tables;
}

LaunchTables::~LaunchTables() {
  for (const Slot& slot : slots_) {
    if (slot.queued) device_.Synchronize(slot.used.get()).IgnoreError();
  }
}

absl::StatusOr<LaunchTables::Slot*> LaunchTables::Next() {
  Slot& slot = slots_[next_];
  if (slot.queued) CRUMB_RETURN_IF_ERROR(device_.Synchronize(slot.used.get()));
  next_ = (next_ + 1) % slots_.size();
  slot.queued = false;
  return &slot;
}

absl::Status LaunchTables::Send(const Slot& slot, DeviceStream stream) {
  const DeviceCopy copy{reinterpret_cast<uint64_t>(slot.device.pages),
                        reinterpret_cast<uint64_t>(slot.host.pages), table_bytes_};
  return device_.ToDevice({&copy, 1}, stream);
}

absl::Status LaunchTables::Queued(Slot& slot, DeviceStream stream) {
  CRUMB_RETURN_IF_ERROR(device_.Record(slot.used.get(), stream));
  slot.queued = true;
  return absl::OkStatus();
}

}  // namespace crumb::client
