// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <iostream>

#include "crumb/device_worker.h"
#include "tests/client/gpu/pools/pool_player.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {

// The GPUs of this machine.
const PlayerPlatform& Platform() {
  static const PlayerPlatform platform = [] {
    PlayerPlatform made;
    made.open = [](int ordinal) -> std::shared_ptr<Device> {
      auto device = OpenCudaDevice(ordinal);
      if (device.ok()) return std::shared_ptr<Device>(device->release(), CloseDevice());
      std::cerr << device.status() << '\n';
      return nullptr;
    };
    made.options = SmallWorkerOptions();
    made.options.q_heads = 8;
    made.options.head_dim = 128;
    made.options.group_size = 128;
    made.options.draft_slots = 7;
    made.options.watch_every = 0;
    made.options.rotations = RotationSet::Hadamard(128).value();
    made.free_bytes = [] {
      size_t free = 0, total = 0;
      return cudaMemGetInfo(&free, &total) == cudaSuccess ? free : 0;
    };
    made.error_max = 1e-2;  // bound of single tokens: some codes round differently
    return made;
  }();
  return platform;
}

}  // namespace crumb::client
