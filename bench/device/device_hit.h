// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/gpu/device/device.h"
#include "common/clock.h"
#include "crumb/worker_options.h"

// Times a prefix hit in the pools of a device, from Begin to the page table on the device, with a
// crumbd on the same host. Nothing is copied. The time consists of the request: the keys of all
// pages are hashed, crumbd leases the pages, every slot is held, and the tables of the pass are
// copied to the device.
namespace crumb::bench {

struct DeviceHitWorkload {
  client::WorkerOptions options;
  int tokens = 102400;  // tokens of the prompt
  int rounds = 60;
  std::string socket_dir;  // folder of crumbd's sockets
  Duration connect_wait = std::chrono::seconds(20);
};

struct DeviceHitResult {
  int pages = 0;              // pages that hit, all of them on the device
  int rounds = 0;             // excludes the first three, which warm up
  double begin_ms_p50 = 0.0;  // time of the call of Begin
  double ready_ms_p50 = 0.0;  // time until attention of the first layer can run
  double ready_ms_p99 = 0.0;
  double acquire_ms_p50 = 0.0;  // time of an Acquire of as many pages by itself
};

struct PeerHitResult {
  int pages = 0;      // pages that hit, all of them in the peer's pools
  int rounds = 0;     // each with a different prefix, without one that warms up
  int64_t bytes = 0;  // bytes of all tiles
  // The times below are medians, counted from the call of Begin.
  double begin_ms = 0.0;        // time when the call returns
  double first_layer_ms = 0.0;  // time when the first layer has arrived and is verified
  double all_layers_ms = 0.0;
  double gbps = 0.0;  // bytes over all_layers_ms
};

// Times a prefix that is in the pools of `peer`, the device of ordinal `peer_ordinal`, and is
// copied into pools of `device`. There are as many rounds as distinct prefixes in the peer's
// memory.
absl::StatusOr<PeerHitResult> RunPeerHit(const DeviceHitWorkload& workload, client::Device& device,
                                         client::Device& peer, int peer_ordinal);

// Times a prefix in the pools of `device`. kInternal: pages did not hit there, or were copied.
absl::StatusOr<DeviceHitResult> RunDeviceHit(const DeviceHitWorkload& workload,
                                             client::Device& device);

}  // namespace crumb::bench
