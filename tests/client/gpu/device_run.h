// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/gpu/device/owned.h"
#include "crumb/device_worker.h"
#include "tests/client/gpu/simulated_device.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {

// One sequence's tokens in a pass: the model's tokens [sequence.length(), end), the first
// `accepted` of which stay.
struct RunEntry {
  DeviceSequence* sequence = nullptr;
  const SequenceModel* model = nullptr;
  int end = 0;
  int accepted = 0;
};

// A pass that was enqueued, and its outputs once the device has written them.
class RunPass {
 public:
  // Returns [layers, tokens, q_heads, head_dim] of entry i. Blocks until the device is done.
  std::vector<float> Outputs(size_t entry) const;

 private:
  friend class DeviceRun;
  Device* device = nullptr;
  DeviceStream stream = nullptr;
  std::vector<DeviceBuffer> buffers;
  PinnedBuffer out;
  std::deque<std::vector<kernels::Bf16>> rows;  // kept until they are copied
  int layers = 0;
  size_t row = 0;          // elements of one token
  size_t rows_max = 0;     // maximum of one layer
  std::vector<int> first;  // first row of each entry
  std::vector<int> tokens;
};

// Returns ||got - expected|| / ||expected||; infinite if the sizes differ.
double RelativeError(const std::vector<float>& got, const std::vector<float>& expected);

// Blocks until all work queued on `stream` is done.
void Drain(Device& device, DeviceStream stream);

// Captures a stream's work; `end` returns a function that launches it once more.
struct Capturing {
  std::function<void(DeviceStream)> begin;
  std::function<std::function<void()>(DeviceStream)> end;
};
Capturing Simulated(SimulatedDevice& device);

// DeviceRun plays an engine on one stream with one batch: it copies rows to the device and runs
// passes.
class DeviceRun {
 public:
  // Borrows device and worker. The stream is the run's own.
  DeviceRun(Device& device, DeviceWorker& worker, DeviceBatchOptions options);
  ~DeviceRun();

  DeviceBatch& batch() { return *batch_; }
  DeviceStream stream() const { return stream_.get(); }

  // Runs a whole pass. After Capture, the calls between Prepare and Advance are captured the first
  // time and launched as a graph each time; q, k, v and out are always in the same buffers then.
  std::shared_ptr<RunPass> Pass(const std::vector<RunEntry>& entries);
  // Does the same for calls that fail; returns the status of Prepare or Advance.
  absl::StatusOr<std::shared_ptr<RunPass>> TryPass(const std::vector<RunEntry>& entries);
  void Capture(Capturing capturing) { capturing_ = std::move(capturing); }
  // Position of the token whose keys are NaN; -1: none.
  int poisoned_position = -1;

 private:
  void ForbidAllocations(bool forbid);
  void Fill(RunPass& pass, const std::vector<RunEntry>& entries);
  void Enqueue(RunPass& pass);
  DeviceAddress Buffer(RunPass& pass, size_t bytes);

  Device& device_;
  SimulatedDevice* const simulated_;  // null for a real device
  DeviceWorker& worker_;
  DeviceBatchOptions options_;
  OwnedStream stream_;
  std::unique_ptr<DeviceBatch> batch_;
  Capturing capturing_;
  std::function<void()> launch_;
  std::shared_ptr<RunPass> captured_;
  // [layers] of the pass being prepared
  std::vector<DeviceAddress> q_, k_, v_, out_;
};

// Flips a bit in the middle of a page that the sequence attends, in device memory. Returns "ok", or
// the reason of a failure.
std::string FlipBit(Device& device, DeviceSequence& sequence, int page);

}  // namespace crumb::client
