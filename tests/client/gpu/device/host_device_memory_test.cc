// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include <cstring>

#include "common/mapping.h"
#include "device_memory_contract.h"

namespace crumb::client {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, DeviceMemoryContract,
                         testing::Values(DeviceUnderTest{
                             "host",
                             []() -> absl::StatusOr<std::unique_ptr<DeviceMemory>> {
                               return DeviceMemory::OpenHost({.name = "contract"});
                             },
                             [](DeviceAddress to, std::span<const std::byte> bytes) {
                               std::memcpy(reinterpret_cast<std::byte*>(to), bytes.data(),
                                           bytes.size());
                             }}),
                         [](const auto& test) { return test.param.name; });

TEST(HostDeviceMemoryTest, NamesAreDevices) {
  const auto one = DeviceMemory::OpenHost({.name = "one"});
  EXPECT_EQ(one->uuid(), DeviceMemory::OpenHost({.name = "one"})->uuid());
  EXPECT_FALSE(one->uuid() == DeviceMemory::OpenHost({.name = "two"})->uuid());
}

TEST(HostDeviceMemoryTest, BoundsWhatItAllocates) {
  const uint64_t piece = DeviceMemory::OpenHost({})->granularity();
  const auto memory = DeviceMemory::OpenHost({.name = "small", .bytes_max = 2 * piece});
  auto first = memory->Allocate(piece);
  const auto second = memory->Allocate(piece);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(memory->Allocate(piece).status()));
  first->reset();
  EXPECT_TRUE(memory->Allocate(piece).ok());
}

// A file that can shrink, or is too small, would kill every process that reads the mapping.
TEST(HostDeviceMemoryTest, RefusesFilesThatAreNoHandles) {
  const auto memory = DeviceMemory::OpenHost({});
  const uint64_t piece = memory->granularity();
  EXPECT_TRUE(
      absl::IsDataLoss(memory->Import(CreateMemfd("unsealed", piece).value(), piece).status()));
  const auto handle = memory->Allocate(piece);
  ASSERT_TRUE(handle.ok());
  EXPECT_TRUE(absl::IsDataLoss(memory->Import((*handle)->Export().value(), 2 * piece).status()));
  struct stat status;
  const UniqueFd fd = (*handle)->Export().value();
  ASSERT_EQ(::fstat(fd.get(), &status), 0);
  EXPECT_EQ(static_cast<uint64_t>(status.st_size), piece);
}

}  // namespace
}  // namespace crumb::client
