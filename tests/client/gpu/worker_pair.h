// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "crumb/device_worker.h"
#include "crumb/worker.h"
#include "tests/client/gpu/simulated_device.h"
#include "tests/client/memory_client.h"

namespace crumb::client {

inline constexpr Duration kPatience = std::chrono::seconds(60);

// SmallWorkerOptions with 7 draft slots and no quality watch.
WorkerOptions PairOptions();
// Means of keys, by position, and of values, for the shapes of PairOptions; no other constants.
RotationSet::Arrays RandomMeans(std::mt19937& random);
// 128 pages, 8 sequences, 4 prompts, loads of 64 pages; no scrubbing.
DeviceWorkerOptions SmallDevice();

// Opens a worker; fails the test if that fails. `client` may be null.
std::unique_ptr<DeviceWorker> OpenDeviceWorker(const WorkerOptions& options, Client* client,
                                               SimulatedDevice& device,
                                               const DeviceWorkerOptions& sizes = SmallDevice());
std::unique_ptr<DeviceSequence> BeginOn(DeviceWorker& worker, std::span<const int32_t> prompt,
                                        const SequenceOptions& options = {});

// Checks that values are finite and differ by rounding at most.
void ExpectSame(const std::vector<float>& got, const std::vector<float>& expected,
                const std::string& where);

// A worker of each back end with equal options, and the stores that they publish to.
struct WorkerPair {
  // `seed` determines the order in which the device's streams proceed.
  WorkerPair(const WorkerOptions& options, uint32_t seed,
             const DeviceWorkerOptions& sizes = SmallDevice());

  // Blocks until every evicted page is published.
  void Settle();
  // Calls Settle and checks that both workers published the same keys, headers and tiles.
  void ExpectSamePages();
  // Switches new sequences of both workers to BF16 history, or back.
  void SetState(KeyspaceState state);
  // Damages the GPU worker's published pages at this position.
  void DamagePages(uint32_t position);

  MemoryClient cpu_store, device_store;
  SimulatedDevice device;
  std::unique_ptr<Worker> cpu;
  std::unique_ptr<DeviceWorker> worker;
};

}  // namespace crumb::client
