// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/device/device_workload.h"

#include "gtest/gtest.h"
#include "tests/client/gpu/simulated_device.h"
#include "tests/client/sequence_model.h"

namespace crumb::bench {
namespace {

TEST(DeviceWorkloadTest, RunsOnASimulatedDevice) {
  client::SimulatedDevice device(1);
  DeviceWorkload workload;
  workload.options = client::SmallWorkerOptions();
  workload.options.draft_slots = 7;
  workload.options.watch_every = 0;
  workload.context = 1500;
  workload.batches = {1, 3};
  workload.passes = 192;
  workload.host_pages = 5;
  const auto result = RunDeviceWorkload(workload, device, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  // These are the sink and 18 pages of history: 1,500 tokens without the last 256.
  const kernels::TileShape shape = workload.options.tile_shape();
  EXPECT_EQ(result->fetch.bytes,
            static_cast<int64_t>(4 * (shape.bf16_bytes() + 18 * shape.int2_bytes())));
  EXPECT_GT(result->fetch.fetch_gbps, 0.0);
  EXPECT_GT(result->fetch.copy_gbps, 0.0);
  EXPECT_LE(result->fetch.first_layer_seconds, result->fetch.all_layers_seconds);
  ASSERT_EQ(result->decode.size(), 2u);
  for (const DecodeResult& decode : result->decode) {
    EXPECT_GT(decode.step_seconds, 0.0);
    EXPECT_GT(decode.evict_seconds, 0.0);
    EXPECT_GT(decode.mean_seconds, 0.0);
    EXPECT_GT(decode.beside_load_seconds, 0.0);
    EXPECT_GT(decode.load_seconds, 0.0);
    EXPECT_EQ(decode.published_pages, 3u * decode.batch);
  }
  EXPECT_EQ(device.live_allocations(), 0u);
}

TEST(DeviceWorkloadTest, RefusesWhatMeasuresNothing) {
  client::SimulatedDevice device(1);
  DeviceWorkload workload;
  workload.options = client::SmallWorkerOptions();
  EXPECT_EQ(RunDeviceWorkload(workload, device, nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace crumb::bench
