// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/device/owned.h"
#include "common/mutex.h"

namespace crumb::client {

// EvictTable has the addresses of the tables and results of one evict launch, with the same layout
// in pinned and in device memory. The launch reads the tables before `sums`.
struct EvictTable {
  // Returns the table at `base` for at most `windows` windows of `tiles` tiles each.
  static EvictTable At(uint64_t base, int windows, int tiles);
  // Returns the size of a table in bytes.
  static size_t Bytes(int windows, int tiles);

  int32_t* windows = nullptr;         // [1]
  uint64_t* ring_address = nullptr;   // [windows]
  uint64_t* tile_address = nullptr;   // [windows]
  int32_t* ring_begin = nullptr;      // [windows]
  int32_t* position_block = nullptr;  // [windows]
  uint32_t* status = nullptr;         // [windows] zeros before the launch
  uint32_t* sums = nullptr;           // [windows, tiles]

  // Returns the bytes of the arrays before `sums`, which are copied to the device in front of a
  // launch; status words are zeros there.
  size_t input_bytes() const {
    return reinterpret_cast<uint64_t>(sums) - reinterpret_cast<uint64_t>(windows);
  }
};

// EvictResults owns pinned tables. A launch takes a table and returns it once the host has read the
// results. Thread-safe.
//
// The number of tables bounds the launches whose results were not read yet
// (DeviceWorkerOptions::evict_results), and with it the pinned memory.
class EvictResults {
 public:
  static absl::StatusOr<std::unique_ptr<EvictResults>> Create(Device& device, int count,
                                                              int windows, int tiles);

  // Returns the table to EvictResults on destruction.
  using Table = std::shared_ptr<const EvictTable>;
  // Blocks while all tables are taken; those of enqueued launches return by themselves.
  Table Take();

  // Returns the maximum number of windows in one launch.
  int windows() const { return windows_; }

 private:
  explicit EvictResults(int windows) : windows_(windows) {}

  const int windows_;
  PinnedBuffer memory_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<EvictTable> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::client
