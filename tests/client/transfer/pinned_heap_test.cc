// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/pinned_heap.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "client/worker/page_pool.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/simulated_device.h"

namespace crumb::client {
namespace {

constexpr size_t kBytes = size_t{1} << 20;

TEST(PinnedHeapTest, BlocksAreAlignedAndApartAndMergeWhenTheyReturn) {
  auto heap = PinnedHeap::Create(std::make_shared<SimulatedDevice>(1), kBytes).value();
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<std::byte>> blocks;
    std::map<std::byte*, size_t> ranges;
    while (true) {
      const size_t bytes = 1 + random() % 60000;
      auto block = heap->Allocate(bytes);
      if (!block.ok()) {
        EXPECT_TRUE(absl::IsResourceExhausted(block.status())) << block.status();
        break;
      }
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block->get()) % kTileAlignment, 0u);
      std::memset(block->get(), round, bytes);
      ranges[block->get()] = bytes;
      blocks.push_back(*std::move(block));
      // Some return before the heap is full, so that later blocks fill gaps.
      if (random() % 3 == 0) {
        const size_t returned = random() % blocks.size();
        ranges.erase(blocks[returned].get());
        blocks.erase(blocks.begin() + static_cast<ptrdiff_t>(returned));
      }
    }
    for (auto at = ranges.begin(); at != ranges.end() && std::next(at) != ranges.end(); ++at) {
      EXPECT_LE(at->first + at->second, std::next(at)->first);
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    blocks.clear();
    EXPECT_TRUE(heap->Allocate(kBytes).ok()) << "free pieces were not merged";
  }
}

TEST(PinnedHeapTest, AnEmptyHeapHasNoBlocks) {
  auto heap = PinnedHeap::Create(std::make_shared<SimulatedDevice>(1), 0).value();
  EXPECT_TRUE(absl::IsResourceExhausted(heap->Allocate(1).status()));
}

// Pages may wait to be published when their cache is no longer used, and its device was closed.
TEST(PinnedHeapTest, ABlockKeepsItsMemoryAndDevice) {
  auto device = std::make_shared<SimulatedDevice>(1);
  const std::weak_ptr<SimulatedDevice> watched = device;
  auto heap = PinnedHeap::Create(device, kBytes).value();
  std::shared_ptr<std::byte> block = heap->Allocate(4096).value();
  heap.reset();
  device.reset();
  ASSERT_FALSE(watched.expired());
  std::memset(block.get(), 7, 4096);
  block.reset();
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace crumb::client
