// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/owned.h"

namespace crumb::client {

// LaunchTable has the addresses of the tables of one quantize-from or dequantize launch, with the
// same layout in pinned and in device memory.
struct LaunchTable {
  static LaunchTable At(uint64_t base, int pages, int blocks);
  // Returns the size of a table in bytes.
  static size_t Bytes(int pages, int blocks);

  int32_t* pages = nullptr;           // [1]
  uint64_t* tile_address = nullptr;   // [pages]
  int32_t* sequence = nullptr;        // [pages] zeros: a launch has pages of one sequence
  int32_t* first_token = nullptr;     // [pages] counted from the first block of `blocks`
  int32_t* position_block = nullptr;  // [pages]
  uint32_t* status = nullptr;         // [pages] zeros before the launch
  int32_t* blocks = nullptr;          // [blocks]
};

// LaunchTables is a ring of tables for launches that are queued on a stream. Used by one thread at
// a time.
//
//     Next() -> fill in Slot::host -> Send(slot) -> launch the kernel -> Queued(slot)
//
// Next waits for the event of the slot's former launch, so that the ring's size bounds the launches
// in flight. The destructor waits for all of them.
class LaunchTables {
 public:
  // `count` launches of at most `pages` pages and `blocks` blocks may be queued. `device` is
  // borrowed.
  static absl::StatusOr<std::unique_ptr<LaunchTables>> Create(Device& device, int count, int pages,
                                                              int blocks);
  ~LaunchTables();

  // One table of the ring, in both memories, and the state of its launch.
  struct Slot {
    LaunchTable host;  // to be filled in
    LaunchTable device;
    OwnedEvent used;  // the launch has read the tables
    bool queued = false;
  };
  // Returns the next slot. Blocks while all of them are queued.
  absl::StatusOr<Slot*> Next();
  // Enqueues the copy of the slot's tables to the device.
  absl::Status Send(const Slot& slot, DeviceStream stream);
  // Marks the slot as used by the work enqueued on `stream` so far.
  absl::Status Queued(Slot& slot, DeviceStream stream);

 private:
  LaunchTables(Device& device, size_t bytes) : device_(device), table_bytes_(bytes) {}

  Device& device_;
  const size_t table_bytes_;
  PinnedBuffer host_;
  DeviceBuffer memory_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

}  // namespace crumb::client
