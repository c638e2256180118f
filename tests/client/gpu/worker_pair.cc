// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/worker_pair.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "gtest/gtest.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {

WorkerOptions PairOptions() {
  WorkerOptions options = SmallWorkerOptions();
  options.draft_slots = 7;
  options.watch_every = 0;
  options.part_pages = 3;  // prefixes are acquired in parts
  return options;
}

RotationSet::Arrays RandomMeans(std::mt19937& random) {
  RotationSet::Arrays arrays;
  arrays.layers = 2;
  arrays.kv_heads = 2;
  arrays.head_dim = 64;
  arrays.q_heads = 4;
  arrays.position_blocks = 3;
  arrays.pages_per_position_block = 2;
  arrays.mean_k.resize(2 * 2 * 3 * 64);
  arrays.mean_v.resize(2 * 2 * 64);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  for (auto* values : {&arrays.mean_k, &arrays.mean_v}) {
    for (float& value : *values) value = normal(random);
  }
  return arrays;
}

DeviceWorkerOptions SmallDevice() {
  DeviceWorkerOptions options;
  options.pages = 128;
  options.sequences = 8;
  options.prompts = 4;
  options.load_pages = 64;
  options.scrub_pages_per_second = 0;  // it would hold slots for a moment
  return options;
}

std::unique_ptr<DeviceWorker> OpenDeviceWorker(const WorkerOptions& options, Client* client,
                                               SimulatedDevice& device,
                                               const DeviceWorkerOptions& sizes) {
  auto worker = DeviceWorker::Open(options, sizes, client, device);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return std::move(worker).value();
}

std::unique_ptr<DeviceSequence> BeginOn(DeviceWorker& worker, std::span<const int32_t> prompt,
                                        const SequenceOptions& options) {
  auto sequence = worker.Begin(prompt, options);
  EXPECT_TRUE(sequence.ok()) << sequence.status();
  return std::move(sequence).value();
}

void ExpectSame(const std::vector<float>& got, const std::vector<float>& expected,
                const std::string& where) {
  ASSERT_EQ(got.size(), expected.size());
  double worst = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::isfinite(got[i])) << where << " element " << i;
    worst = std::max<double>(worst, std::abs(got[i] - expected[i]));
  }
  EXPECT_LT(worst, 2e-5) << where;
}

WorkerPair::WorkerPair(const WorkerOptions& options, uint32_t seed,
                       const DeviceWorkerOptions& sizes)
    : device(seed),
      cpu(Worker::Open(options, &cpu_store).value()),
      worker(OpenDeviceWorker(options, &device_store, device, sizes)) {}

void WorkerPair::Settle() {
  EXPECT_TRUE(cpu->WaitPublished(kPatience).ok());
  EXPECT_TRUE(worker->WaitPublished(kPatience).ok());
}

void WorkerPair::ExpectSamePages() {
  Settle();
  const std::map<PageKey, std::string> ours = device_store.contents();
  const std::map<PageKey, std::string> theirs = cpu_store.contents();
  EXPECT_EQ(ours.size(), theirs.size());
  int differ = 0;  // the message has the number of differences
  for (const auto& [key, bytes] : ours) {
    const auto found = theirs.find(key);
    differ += found == theirs.end() || found->second != bytes;
  }
  EXPECT_EQ(differ, 0);
}

void WorkerPair::SetState(KeyspaceState state) {
  for (MemoryClient* store : {&cpu_store, &device_store}) {
    for (const KeyspaceId& keyspace : store->int2_keyspaces()) {
      ASSERT_TRUE(store->SetKeyspaceState(keyspace, state, "test", "test").ok());
    }
  }
}

void WorkerPair::DamagePages(uint32_t position) {
  for (const auto& [key, bytes] : device_store.contents()) {
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes)));
    ASSERT_TRUE(header.ok()) << header.status();
    if (header->position == position) {
      ASSERT_TRUE(device_store.Damage(key));
    }
  }
}

}  // namespace crumb::client
