// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/device/device.h"
#include "crumb/device_options.h"
#include "crumb/worker_options.h"

// Times the device worker itself: prefixes that are fetched from host memory, and decode passes
// (append, attention, eviction, publishing) without the model's projections. Its crumbd has every
// page (bench/device/endless_client.h), so that no page is computed.
namespace crumb::bench {

struct DeviceWorkload {
  client::WorkerOptions options;
  int context = 102400;      // tokens that a sequence holds when it decodes
  std::vector<int> batches;  // sequences that decode together
  int passes = 448;          // decode passes of each batch: seven windows of each sequence
  int host_pages = 256;      // pages with different contents in host memory
  int load_kernel_layers = client::DeviceWorkerOptions().load_kernel_layers;
};

// Captures the work that `pass` enqueues on a stream; the returned function launches it again. If
// it is empty, passes are enqueued call by call.
using CapturePass =
    std::function<std::function<void()>(client::DeviceStream, const std::function<void()>& pass)>;

// Times are medians, counted from the call of Begin.
struct FetchResult {
  int64_t bytes = 0;
  double copy_gbps = 0.0;            // rate of one pinned copy of as many bytes
  double fetch_gbps = 0.0;           // rate until all layers have arrived
  double begin_seconds = 0.0;        // time when the call returns
  double first_layer_seconds = 0.0;  // time when the first layer has arrived and is verified
  double all_layers_seconds = 0.0;
  // The time if the prompt's last tokens attend each layer as soon as it has arrived.
  double first_attended_seconds = 0.0;
  double all_attended_seconds = 0.0;
};

struct DecodeResult {
  int batch = 0;
  double step_seconds = 0.0;         // median of passes without evictions
  double evict_seconds = 0.0;        // median of passes that evict a window of every sequence
  double mean_seconds = 0.0;         // mean of all passes, without waits between them
  double beside_load_seconds = 0.0;  // median while the prefix of another sequence is fetched
  double load_seconds = 0.0;         // time when that prefix has arrived
  uint64_t published_pages = 0;
};

struct DeviceResult {
  FetchResult fetch;
  std::vector<DecodeResult> decode;
};

// Returns errors of the worker. kInternal: its counters do not show the expected work.
absl::StatusOr<DeviceResult> RunDeviceWorkload(const DeviceWorkload& workload,
                                               client::Device& device, const CapturePass& capture);

// Returns the options of a worker with the shape of Qwen3-8B (36 layers, 8 KV heads, 32 query
// heads, head_dim 128) and Hadamard rotations, without quality watch.
client::WorkerOptions Qwen3Of8B();

// Opens a device that completes everything at once without doing it: memory is reserved but not
// touched, copies and kernels are accepted but not executed. The time of a worker with it is the
// host's work alone, on any machine. Idle devices of other ordinals are its peers.
std::unique_ptr<client::Device> OpenIdleDevice(int ordinal = 0);

}  // namespace crumb::bench
