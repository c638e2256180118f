// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/device/device.h"
#include "crumb/device_options.h"
#include "crumb/worker_options.h"

// What the device worker itself costs: prefixes that come from host memory, and decode passes
// (append, attention, eviction, publishing) without the model's projections. Over a crumbd that has
// every page (bench/device/endless_client.h), so nothing is computed twice.
namespace crumb::bench {

struct DeviceWorkload {
  client::WorkerOptions options;
  int context = 102400;      // tokens that a sequence holds when it decodes
  std::vector<int> batches;  // sequences that decode together
  int passes = 448;          // decode passes of each batch: seven windows of each sequence
  int host_pages = 256;      // different ones in host memory
  int load_kernel_layers = client::DeviceWorkerOptions().load_kernel_layers;
};

// Captures what is enqueued on a stream; the answer launches it once more. Empty: passes are
// enqueued call by call.
using CapturePass =
    std::function<std::function<void()>(client::DeviceStream, const std::function<void()>& pass)>;

// Seconds are counted from the call of Begin on; medians.
struct FetchResult {
  int64_t bytes = 0;
  double copy_gbps = 0.0;            // of one pinned copy of as many bytes
  double fetch_gbps = 0.0;           // until all layers are there
  double begin_seconds = 0.0;        // the call
  double first_layer_seconds = 0.0;  // the first layer is there and checked
  double all_layers_seconds = 0.0;
  // With the prompt's last tokens attending each layer as soon as it is there:
  double first_attended_seconds = 0.0;
  double all_attended_seconds = 0.0;
};

struct DecodeResult {
  int batch = 0;
  double step_seconds = 0.0;         // median of passes in which nothing leaves
  double evict_seconds = 0.0;        // median of those in which a window of every sequence does
  double mean_seconds = 0.0;         // of all passes, one after the other without waiting
  double beside_load_seconds = 0.0;  // median while the prefix of another sequence comes
  double load_seconds = 0.0;         // until that is there
  uint64_t published_pages = 0;
};

struct DeviceResult {
  FetchResult fetch;
  std::vector<DecodeResult> decode;
};

// Errors of the worker; kInternal: what it should have counted is not there.
absl::StatusOr<DeviceResult> RunDeviceWorkload(const DeviceWorkload& workload,
                                               client::Device& device, const CapturePass& capture);

}  // namespace crumb::bench
