// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "crumb/device_batch.h"
#include "crumb/device_options.h"
#include "crumb/device_sequence.h"
#include "crumb/sequence_options.h"
#include "crumb/worker_counters.h"
#include "crumb/worker_options.h"

namespace crumb::client {

class Client;
class Device;

// A device sequence and what the other ranks of its engine begin theirs with.
struct LedDeviceSequence {
  std::unique_ptr<DeviceSequence> sequence;
  std::string token;
};

// The KV cache of one model replica, or of one rank of it, in the memory of one GPU: what Worker is
// on the CPU, with the same options, keyspaces, prefixes and published pages. Thread-safe.
// Threads of its own look at the results of evicted windows, publish pages and measure windows.
class DeviceWorker {
 public:
  virtual ~DeviceWorker() = default;
  DeviceWorker(const DeviceWorker&) = delete;
  DeviceWorker& operator=(const DeviceWorker&) = delete;

  // `client` is borrowed and may be null: no crumbd. `device` is borrowed and outlives the worker.
  // Allocates everything. kInvalidArgument: an option, or one that the device back end does not
  // serve (more than 7 draft slots); kResourceExhausted: too little device memory.
  static absl::StatusOr<std::unique_ptr<DeviceWorker>> Open(
      const WorkerOptions& options, const DeviceWorkerOptions& device_options, Client* client,
      Device& device);

  // As Worker::Begin, Lead and Follow. Cached pages are on their way to the device when this
  // returns, layer after layer; a pass may begin at once. kResourceExhausted: no device memory for
  // BF16 history, which the keyspace's state asks for.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> Begin(
      std::span<const int32_t> tokens, const SequenceOptions& options = {}) = 0;
  virtual absl::StatusOr<LedDeviceSequence> Lead(std::span<const int32_t> tokens,
                                                 const SequenceOptions& options = {}) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> Follow(
      std::string_view token, std::span<const int32_t> tokens,
      const SequenceOptions& options = {}) = 0;

  // kInvalidArgument: sizes that the kernels do not serve; kResourceExhausted: device memory.
  virtual absl::StatusOr<std::unique_ptr<DeviceBatch>> NewBatch(
      const DeviceBatchOptions& options) = 0;

  // Waits until everything that passes have evicted so far was published or dropped, and measured
  // where the quality watch wants that.
  // kDeadlineExceeded: not within `timeout`.
  virtual absl::Status WaitPublished(Duration timeout) = 0;

  virtual const WorkerOptions& options() const = 0;
  virtual WorkerCounters counters() const = 0;
  virtual DevicePoolUse pool_use() const = 0;  // zeros without pools

 protected:
  DeviceWorker() = default;
};

}  // namespace crumb::client
