// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/device/device.h"
#include "common/clock.h"
#include "crumb/worker_options.h"

// A prefix that lies in the device's pools: from Begin to the page table on the device, over a
// crumbd on the same host. Nothing is copied, so what is timed is the asking: the keys of all pages
// are hashed, crumbd leases them, every slot is held, and the pass's tables go to the device.
namespace crumb::bench {

struct DeviceHitWorkload {
  client::WorkerOptions options;
  int tokens = 102400;  // of the prompt
  int rounds = 60;
  std::string socket_dir;  // of crumbd
  Duration connect_wait = std::chrono::seconds(20);
};

struct DeviceHitResult {
  int pages = 0;              // that hit, all of them on the device
  int rounds = 0;             // after the first three, which warm up
  double begin_ms_p50 = 0.0;  // the call of Begin
  double ready_ms_p50 = 0.0;  // until attention of the first layer can run: the target's time
  double ready_ms_p99 = 0.0;
  double acquire_ms_p50 = 0.0;  // of Begin, an Acquire of as many pages by itself
};

struct PeerHitResult {
  int pages = 0;      // that hit, all of them in the peer's pools
  int rounds = 0;     // each with a prefix of its own, after one that warms up
  int64_t bytes = 0;  // of all tiles
  // From the call of Begin on, medians:
  double begin_ms = 0.0;        // the call
  double first_layer_ms = 0.0;  // the first layer is there and checked
  double all_layers_ms = 0.0;
  double gbps = 0.0;  // bytes by all_layers_ms
};

// A prefix that lies in the pools of `peer`, the device of ordinal `peer_ordinal`, and is copied
// into pools of `device`. Of rounds as many as there are distinct prefixes in the peer's memory.
absl::StatusOr<PeerHitResult> RunPeerHit(const DeviceHitWorkload& workload, client::Device& device,
                                         client::Device& peer, int peer_ordinal);

// kInternal: pages did not hit on the device, or something was copied.
absl::StatusOr<DeviceHitResult> RunDeviceHit(const DeviceHitWorkload& workload,
                                             client::Device& device);

}  // namespace crumb::bench
