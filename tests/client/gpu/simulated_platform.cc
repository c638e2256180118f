// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/pools/pool_player.h"
#include "tests/client/gpu/simulated_device.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {

// Two devices of host memory.
const PlayerPlatform& Platform() {
  static const PlayerPlatform platform = [] {
    PlayerPlatform made;
    made.open = [](int ordinal) -> std::shared_ptr<Device> {
      const std::vector<std::string> names = {"simulated-0", "simulated-1"};
      if (ordinal >= static_cast<int>(names.size())) return nullptr;
      return std::make_shared<SimulatedDevice>(static_cast<uint32_t>(ordinal) + 7, SIZE_MAX,
                                               names[static_cast<size_t>(ordinal)], names);
    };
    made.options = SmallWorkerOptions();
    made.options.draft_slots = 7;
    made.options.watch_every = 0;
    made.error_max = 1e-5;
    return made;
  }();
  return platform;
}

}  // namespace crumb::client
