// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "device_memory_contract.h"

#include <fcntl.h>

#include <random>
#include <vector>

namespace crumb::client {
namespace {

std::vector<std::byte> RandomBytes(size_t size, uint32_t seed) {
  std::minstd_rand random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 8);
  return bytes;
}

}  // namespace

TEST_P(DeviceMemoryContract, WhatOneProcessWritesAnotherReadsAtItsOwnAddress) {
  const auto handle = memory_->Allocate(handle_bytes_);
  ASSERT_TRUE(handle.ok()) << handle.status().ToString();
  EXPECT_EQ((*handle)->bytes(), handle_bytes_);
  const auto range = memory_->Reserve(4 * handle_bytes_);
  ASSERT_TRUE(range.ok()) << range.status().ToString();
  ASSERT_TRUE((*range)->Map(2 * handle_bytes_, **handle).ok());

  const auto other = GetParam().open();
  ASSERT_TRUE(other.ok());
  EXPECT_EQ((*other)->uuid(), memory_->uuid());
  auto fd = (*handle)->Export();
  ASSERT_TRUE(fd.ok()) << fd.status().ToString();
  const auto import = (*other)->Import(*std::move(fd), handle_bytes_);
  ASSERT_TRUE(import.ok()) << import.status().ToString();
  const auto other_range = (*other)->Reserve(handle_bytes_);
  ASSERT_TRUE(other_range.ok());
  ASSERT_TRUE((*other_range)->Map(0, **import).ok());

  const std::vector<std::byte> written = RandomBytes(5000, 1);
  GetParam().write((*range)->base() + 2 * handle_bytes_ + 128, written);
  std::vector<std::byte> read(written.size());
  ASSERT_TRUE((*other)->CopyToHost((*other_range)->base() + 128, read).ok());
  EXPECT_EQ(read, written);
}

TEST_P(DeviceMemoryContract, ADescriptorAloneKeepsTheContent) {
  const std::vector<std::byte> written = RandomBytes(4096, 2);
  UniqueFd fd;
  {
    const auto handle = memory_->Allocate(handle_bytes_);
    ASSERT_TRUE(handle.ok());
    const auto range = memory_->Reserve(handle_bytes_);
    ASSERT_TRUE(range.ok());
    ASSERT_TRUE((*range)->Map(0, **handle).ok());
    GetParam().write((*range)->base(), written);
    std::vector<std::byte> settled(1);
    ASSERT_TRUE(memory_->CopyToHost((*range)->base(), settled).ok());
    fd = (*handle)->Export().value();
  }
  const auto import = memory_->Import(std::move(fd), handle_bytes_);
  ASSERT_TRUE(import.ok()) << import.status().ToString();
  const auto range = memory_->Reserve(handle_bytes_);
  ASSERT_TRUE(range.ok());
  ASSERT_TRUE((*range)->Map(0, **import).ok());
  std::vector<std::byte> read(written.size());
  ASSERT_TRUE(memory_->CopyToHost((*range)->base(), read).ok());
  EXPECT_EQ(read, written);
}

TEST_P(DeviceMemoryContract, AMappingOutlivesItsHandle) {
  const auto range = memory_->Reserve(handle_bytes_);
  ASSERT_TRUE(range.ok());
  ASSERT_TRUE((*range)->Map(0, **memory_->Allocate(handle_bytes_)).ok());
  const std::vector<std::byte> written = RandomBytes(300, 3);
  GetParam().write((*range)->base(), written);
  std::vector<std::byte> read(written.size());
  ASSERT_TRUE(memory_->CopyToHost((*range)->base(), read).ok());
  EXPECT_EQ(read, written);
}

TEST_P(DeviceMemoryContract, UnmappedPlacesCanBeMappedAgain) {
  const auto first = memory_->Allocate(handle_bytes_);
  const auto second = memory_->Allocate(handle_bytes_);
  ASSERT_TRUE(first.ok() && second.ok());
  const auto range = memory_->Reserve(2 * handle_bytes_);
  ASSERT_TRUE(range.ok());
  ASSERT_TRUE((*range)->Map(handle_bytes_, **first).ok());
  EXPECT_TRUE(absl::IsInvalidArgument((*range)->Map(handle_bytes_, **second)));
  ASSERT_TRUE((*range)->Unmap(handle_bytes_).ok());
  EXPECT_TRUE(absl::IsNotFound((*range)->Unmap(handle_bytes_)));
  EXPECT_TRUE((*range)->Map(handle_bytes_, **second).ok());
}

TEST_P(DeviceMemoryContract, RefusesWrongSizesAndPlaces) {
  EXPECT_TRUE(absl::IsInvalidArgument(memory_->Allocate(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(memory_->Allocate(handle_bytes_ + 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(memory_->Reserve(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(memory_->Reserve(handle_bytes_ - 1).status()));
  const auto handle = memory_->Allocate(handle_bytes_);
  const auto range = memory_->Reserve(handle_bytes_);
  ASSERT_TRUE(handle.ok() && range.ok());
  EXPECT_TRUE(absl::IsInvalidArgument((*range)->Map(handle_bytes_, **handle)));
  EXPECT_TRUE(absl::IsInvalidArgument((*range)->Map(1, **handle)));
}

TEST_P(DeviceMemoryContract, RefusesDescriptorsOfOtherThings) {
  UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(null.valid());
  EXPECT_TRUE(absl::IsDataLoss(memory_->Import(std::move(null), handle_bytes_).status()));
}

}  // namespace crumb::client
