// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "client/gpu/device/device_memory.h"
#include "gtest/gtest.h"

namespace crumb::client {

// A kind of device memory under test.
struct DeviceUnderTest {
  const char* name = "";
  // Opens the device once more, as another process would.
  std::function<absl::StatusOr<std::unique_ptr<DeviceMemory>>()> open;
  // Writes to mapped memory.
  std::function<void(DeviceAddress, std::span<const std::byte>)> write;
};

// The contract of DeviceMemory, instantiated for every kind.
class DeviceMemoryContract : public testing::TestWithParam<DeviceUnderTest> {
 protected:
  void SetUp() override {
    auto opened = GetParam().open();
    if (absl::IsUnavailable(opened.status()))
      GTEST_SKIP() << "needs a CUDA device: " << opened.status();
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    memory_ = *std::move(opened);
    handle_bytes_ = memory_->granularity();
  }

  std::unique_ptr<DeviceMemory> memory_;
  uint64_t handle_bytes_ = 0;
};

}  // namespace crumb::client
