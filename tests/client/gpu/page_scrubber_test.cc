// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/page_scrubber.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "client/gpu/prefix_loader.h"
#include "common/crc32c.h"
#include "tests/client/gpu/device_run.h"
#include "tests/client/gpu/twin.h"
#include "tests/client/gpu/worker_pair.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

using kernels::PageFormat;

constexpr int kFast = 4000;  // pages per second: rounds follow each other at once

// A fixture with pages that are written and settled, without a worker.
class PageScrubberTest : public testing::Test {
 protected:
  PageScrubberTest() : geometry_(PairOptions()), device_(5) {}

  void Open(int pages_per_second) {
    scrubber_ = PageScrubber::Create({.device = device_,
                                      .geometry = geometry_,
                                      .table = table_,
                                      .pools = nullptr,
                                      .client = nullptr,
                                      .tally = tally_},
                                     pages_per_second)
                    .value();
  }
  std::shared_ptr<const Page> NewPage(int position, PageFormat format = PageFormat::kInt2) {
    const size_t bytes = geometry_.page_bytes(format);
    memory_.push_back(NewDeviceBuffer(device_, bytes).value());
    auto slot = std::make_shared<SlotRef>();
    slot->address = memory_.back().get();
    auto page = geometry_.NewPage(format, std::move(slot));
    page->position = static_cast<uint32_t>(position);
    page->key.bytes[0] = static_cast<uint8_t>(position + 1);
    std::memset(page->tiles, 0x30 + position, bytes);
    for (size_t at = 0; at < bytes; at += page->tile_bytes) {
      page->tile_sums.push_back(Crc32c({page->tiles + at, page->tile_bytes}));
    }
    page->has_sums.Set();
    return page;
  }
  // Flips a bit in the order of the device's streams.
  void Flip(const Page& page) {
    const OwnedStream stream = NewStream(device_).value();
    const PinnedBuffer byte = NewPinnedBuffer(device_, 1).value();
    *byte.get() = page.tiles[0] ^ std::byte{0x80};
    const DeviceCopy copy{reinterpret_cast<uint64_t>(page.tiles),
                          reinterpret_cast<uint64_t>(byte.get()), 1};
    EXPECT_TRUE(device_.ToDevice({&copy, 1}, stream.get()).ok());
    Drain(device_, stream.get());
  }
  uint64_t scrubbed() const { return tally_.pages_scrubbed.value(); }

  const DeviceGeometry geometry_;
  SimulatedDevice device_;
  std::vector<DeviceBuffer> memory_;
  PageTable table_;
  WorkerTally tally_;
  std::unique_ptr<PageScrubber> scrubber_;
};

// The table is empty, so that only offered pages are checked.
TEST_F(PageScrubberTest, AnotherPageOfAPrefixHasItsTurnEachTime) {
  Open(kFast);
  std::vector<std::shared_ptr<const Page>> prefix;
  for (int i = 0; i < 9; ++i)
    prefix.push_back(NewPage(i, i == 0 ? PageFormat::kBf16 : PageFormat::kInt2));
  prefix[6]->tiles[prefix[6]->bytes - 1] ^= std::byte{1};
  scrubber_->Offer(prefix, 0);
  uint64_t expected = 0;
  for (const int looked_at : {3, 2, 2, 2}) {  // pages scrubbed of 9, beginning with 0, 1, 2, 3
    scrubber_->Offer(prefix, 4);
    expected += looked_at;
    ASSERT_TRUE(Eventually([&] { return scrubbed() == expected; })) << scrubbed();
  }
  EXPECT_TRUE(Eventually([&] { return scrubber_->damages() == 1; }));
  for (const auto& page : prefix) {
    EXPECT_EQ(OnDevice(*page).damaged.is_set(), page == prefix[6]) << page->position;
  }
  EXPECT_EQ(tally_.verify_failures.value(), 1u);
  // It is not checked again.
  for (int i = 0; i < 4; ++i) scrubber_->Offer(prefix, 4);
  EXPECT_TRUE(Eventually([&] { return scrubbed() == 17; })) << scrubbed();
  EXPECT_EQ(tally_.verify_failures.value(), 1u);
}

TEST_F(PageScrubberTest, WhatIsHeldIsLookedAtLapAfterLap) {
  std::vector<std::shared_ptr<const Page>> held;
  for (int i = 0; i < 40; ++i) held.push_back(table_.Share(NewPage(i)));
  Open(kFast);
  ASSERT_TRUE(Eventually([&] { return scrubbed() >= 80; }));
  EXPECT_EQ(scrubber_->damages(), 0u);
  Flip(*held[17]);
  EXPECT_TRUE(Eventually([&] { return scrubber_->damages() == 1; }));
  EXPECT_TRUE(OnDevice(*held[17]).damaged.is_set());
  EXPECT_EQ(table_.Find(held[17]->key), nullptr);
  EXPECT_NE(table_.Find(held[16]->key), nullptr);
  // Another page of its key can be inserted.
  const auto again = table_.Share(NewPage(17));
  EXPECT_EQ(table_.Find(held[17]->key), again);
}

// Pages in flight, pages without checksums and pages that were destroyed are not checked.
TEST_F(PageScrubberTest, OnlySettledPagesAreLookedAt) {
  LoadLane lane;
  const auto load = std::make_shared<PrefixLoad>(device_, lane);
  auto coming = std::const_pointer_cast<Page>(NewPage(0));
  static_cast<DevicePage&>(*coming).load = load;
  const size_t bytes = geometry_.page_bytes(PageFormat::kInt2);
  memory_.push_back(NewDeviceBuffer(device_, bytes).value());
  auto slot = std::make_shared<SlotRef>();
  slot->address = memory_.back().get();
  const std::shared_ptr<const Page> unknown = geometry_.NewPage(PageFormat::kInt2, std::move(slot));
  const std::vector<std::shared_ptr<const Page>> prefix = {coming, unknown};
  Open(kFast);
  scrubber_->Offer(prefix, 1);
  scrubber_->Offer(std::vector<std::shared_ptr<const Page>>{NewPage(1)}, 1);
  const std::vector<std::shared_ptr<const Page>> last = {NewPage(2)};
  scrubber_->Offer(last, 1);
  ASSERT_TRUE(Eventually([&] { return scrubbed() >= 1; }));
  EXPECT_LE(scrubbed(), 2u);  // the third may have been destroyed
  EXPECT_EQ(scrubber_->damages(), 0u);
}

// Counts rounds by their statuses, which are copied to the host in one copy of up to 16 words.
struct RoundWatch {
  std::atomic<bool> flipped{false}, found{false};
  std::atomic<int> rounds{0};

  void OnCopy(const DeviceCopy& copy) {
    if (!flipped.load() || found.load() || copy.bytes > 64 || copy.bytes < 8) return;
    ++rounds;
    const auto* status = reinterpret_cast<const uint32_t*>(copy.from);
    for (size_t i = 0; i < copy.bytes / 4; ++i) {
      if (status[i] != 0) found = true;
    }
  }
};

// A prompt's pages take many rounds. After a bit flips, all held pages are checked within two laps:
// the one under way and the next.
TEST(DeviceScrubTest, ADamagedPageIsFoundWithinTwoLaps) {
  for (const int damaged : {0, 1, 9}) {
    SCOPED_TRACE(damaged);
    const WorkerOptions options = PairOptions();
    const SequenceModel model(options, RandomTokens(2600, 3));
    DeviceWorkerOptions sizes = SmallDevice();
    sizes.scrub_pages_per_second = kFast;
    RoundWatch watch;
    MemoryClient cpu_store, device_store;
    SimulatedDevice device(3);
    device.before_copy_to_host = [&](const DeviceCopy& copy) { watch.OnCopy(copy); };
    const auto cpu = Worker::Open(options, &cpu_store).value();
    const auto worker = OpenDeviceWorker(options, &device_store, device, sizes);
    DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun decode(device, *worker, {});
    Twin first(model, 2500, *cpu, *worker);
    RunPrompt(prompts, first, 512);
    RunDecode(decode, first, 1);  // the prompt's last windows are evicted
    first.Check();
    ASSERT_TRUE(first.expected().Finish().ok());
    ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    ASSERT_EQ(FlipBit(device, first.sequence(), damaged), "ok");
    watch.flipped = true;
    ASSERT_TRUE(Eventually([&] { return worker->counters().verify_failures == 1; }));
    EXPECT_TRUE(watch.found.load());
    EXPECT_LE(watch.rounds.load(), 2 * 3 + 1);  // 36 pages are three rounds
    // The sequence that attends it gets an error.
    const auto pass = decode.TryPass({{&first.sequence(), &model, 2502, 1}});
    EXPECT_TRUE(absl::IsDataLoss(pass.status())) << pass.status();
    EXPECT_THAT(std::string(pass.status().message()),
                testing::HasSubstr("entry 0 at token " + std::to_string(64 * damaged)));
    EXPECT_TRUE(absl::IsFailedPrecondition(decode.batch().Finish(first.sequence())));
    // The next sequence gets an undamaged copy, and the same outputs.
    const uint64_t hits = worker->counters().hit_tokens_worker;
    Twin again(model, 2500, *cpu, *worker);
    ASSERT_EQ(again.sequence().cached_tokens(), again.expected().cached_tokens());
    EXPECT_EQ(worker->counters().hit_tokens_worker, hits + 64 * damaged);
    RunPrompt(prompts, again, 512);
    RunDecode(decode, again, 3);
    again.Check();
    again.Finish(decode.batch());
    EXPECT_EQ(worker->counters().verify_failures, 1u);
  }
}

TEST(DeviceScrubTest, ASequenceThatAttendsADamagedPagePublishesNothingMore) {
  const WorkerOptions options = PairOptions();
  const SequenceModel model(options, RandomTokens(1200, 4));
  DeviceWorkerOptions sizes = SmallDevice();
  sizes.scrub_pages_per_second = kFast;
  WorkerPair pair(options, 4, sizes);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  const auto first = BeginOn(*pair.worker, model.prompt(1000));
  RunPrompt(prompts, *first, model, 1000);
  const auto fork = prompts.batch().Fork(*first).value();
  pair.Settle();
  const size_t stored = pair.device_store.pages();
  ASSERT_EQ(FlipBit(pair.device, *first, 2), "ok");
  ASSERT_TRUE(Eventually([&] { return pair.worker->counters().verify_failures == 1; }));
  EXPECT_TRUE(absl::IsDataLoss(prompts.batch().Finish(*first)));
  EXPECT_TRUE(absl::IsDataLoss(prompts.batch().Finish(*fork)));
  pair.Settle();
  EXPECT_EQ(pair.device_store.pages(), stored);
}

}  // namespace
}  // namespace crumb::client
