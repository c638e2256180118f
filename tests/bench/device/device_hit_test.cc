// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/device/device_hit.h"

#include "gtest/gtest.h"
#include "tests/client/gpu/simulated_device.h"
#include "tests/client/sequence_model.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"

namespace crumb::bench {
namespace {

TEST(DeviceHitTest, AllPagesHitInPlaceAndNothingIsLeft) {
  TemporaryFolder folder;
  fault::CrumbdProcess crumbd(folder.path(), {});
  ASSERT_TRUE(crumbd.Start());
  client::SimulatedDevice device(1);
  DeviceHitWorkload workload;
  workload.options = client::SmallWorkerOptions();
  workload.options.draft_slots = 7;
  workload.tokens = 4096;
  workload.rounds = 3;
  workload.socket_dir = folder.path();
  const auto result = RunDeviceHit(workload, device);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages, (4096 - 256) / 64);
  EXPECT_GT(result->ready_ms_p50, 0.0);
  EXPECT_GE(result->ready_ms_p99, result->ready_ms_p50);
  EXPECT_GE(result->ready_ms_p50, result->begin_ms_p50);
  EXPECT_EQ(device.shared_ranges(), 0u);
  EXPECT_EQ(device.live_allocations(), 0u);
}

TEST(DeviceHitTest, SaysThatThereIsNoCrumbd) {
  TemporaryFolder folder;
  client::SimulatedDevice device(1);
  DeviceHitWorkload workload;
  workload.options = client::SmallWorkerOptions();
  workload.tokens = 1024;
  workload.connect_wait = std::chrono::milliseconds(50);
  workload.socket_dir = folder.path();
  EXPECT_TRUE(absl::IsUnavailable(RunDeviceHit(workload, device).status()));
}

}  // namespace
}  // namespace crumb::bench
