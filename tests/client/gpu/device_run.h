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

// One sequence's share of a pass: the model's tokens [sequence.length(), end), the first `accepted`
// of which stay.
struct RunEntry {
  DeviceSequence* sequence = nullptr;
  const SequenceModel* model = nullptr;
  int end = 0;
  int accepted = 0;
};

// A pass that was enqueued, and its outputs once they are there.
class RunPass {
 public:
  // [layers, tokens, q_heads, head_dim] of entry i. Waits for the device.
  std::vector<float> Outputs(size_t entry) const;

 private:
  friend class DeviceRun;
  Device* device = nullptr;
  DeviceStream stream = nullptr;
  std::vector<DeviceBuffer> buffers;
  PinnedBuffer out;
  std::deque<std::vector<kernels::Bf16>> rows;  // until they are copied
  int layers = 0;
  size_t row = 0;          // elements of one token
  size_t rows_max = 0;     // of one layer
  std::vector<int> first;  // row of each entry
  std::vector<int> tokens;
};

// ||got - expected|| / ||expected||; infinite where the sizes differ.
double RelativeError(const std::vector<float>& got, const std::vector<float>& expected);

// Waits until all that is queued on `stream` is done.
void Drain(Device& device, DeviceStream stream);

// How a stream's work is captured; `end` answers what launches it once more.
struct Capturing {
  std::function<void(DeviceStream)> begin;
  std::function<std::function<void()>(DeviceStream)> end;
};
Capturing Simulated(SimulatedDevice& device);

// Plays the engine on one stream with one batch: brings rows to the device, runs passes.
class DeviceRun {
 public:
  // Borrows device and worker. The stream is the run's own.
  DeviceRun(Device& device, DeviceWorker& worker, DeviceBatchOptions options);
  ~DeviceRun();

  DeviceBatch& batch() { return *batch_; }
  DeviceStream stream() const { return stream_.get(); }

  // A whole pass. After Capture, what lies between Prepare and Advance is captured the first time
  // and launched as a graph each time; then q, k, v and out are always in the same buffers.
  std::shared_ptr<RunPass> Pass(const std::vector<RunEntry>& entries);
  // The same, for calls that fail: what Prepare or Advance answered.
  absl::StatusOr<std::shared_ptr<RunPass>> TryPass(const std::vector<RunEntry>& entries);
  void Capture(Capturing capturing) { capturing_ = std::move(capturing); }
  // Keys of the token at this position are NaN; -1: none.
  int poisoned_position = -1;

 private:
  void ForbidAllocations(bool forbid);
  void Fill(RunPass& pass, const std::vector<RunEntry>& entries);
  void Enqueue(RunPass& pass);
  DeviceAddress Buffer(RunPass& pass, size_t bytes);

  Device& device_;
  SimulatedDevice* const simulated_;  // null: a real one
  DeviceWorker& worker_;
  DeviceBatchOptions options_;
  OwnedStream stream_;
  std::unique_ptr<DeviceBatch> batch_;
  Capturing capturing_;
  std::function<void()> launch_;
  std::shared_ptr<RunPass> captured_;
  // [layers] of the pass being made
  std::vector<DeviceAddress> q_, k_, v_, out_;
};

// Flips a bit in the middle of a page that the sequence attends, where it lies; "ok", or why not.
std::string FlipBit(Device& device, DeviceSequence& sequence, int page);

}  // namespace crumb::client
