// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of the prefixes that a GPU worker finds: pages that are loaded, shared or damaged.
#include "client/gpu/gpu_sequence.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/twin.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

TEST(DevicePrefixTest, HitsComeLayerByLayerAndCountAsOnTheCpu) {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = PairOptions();
    const SequenceModel model(options, RandomTokens(1500, 3));
    WorkerPair pair(options, seed);
    pair.device.everything_pinned = true;
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun decode(pair.device, *pair.worker, {});
    for (const int prompt : {900, 1100, 1400}) {
      pair.device.HoldOthers();
      Twin twin(model, prompt, pair);
      EXPECT_EQ(twin.sequence().cached_tokens(), twin.expected().cached_tokens());
      EXPECT_EQ(twin.sequence().stats().hit_tokens_host, twin.expected().stats().hit_tokens_host);
      RunPrompt(prompts, twin, 512);
      RunDecode(decode, twin, 40);
      pair.device.ReleaseOthers();
      twin.Check();
      EXPECT_EQ(twin.sequence().stats().held_bytes, twin.expected().stats().held_bytes);
      EXPECT_EQ(twin.sequence().stats().stored_bytes, twin.expected().stats().stored_bytes);
      twin.Finish(decode.batch());
      pair.ExpectSamePages();
    }
    const WorkerCounters counters = pair.worker->counters();
    EXPECT_EQ(counters.hit_tokens_host, pair.cpu->counters().hit_tokens_host);
    EXPECT_GT(counters.hit_tokens_host, 1000u);
    EXPECT_EQ(counters.verify_failures, 0u);
  }
}

// Pages in pinned memory are copied by the kernel, others by copies, together and alone.
TEST(DevicePrefixTest, HitsComeFromPinnedMemoryAndFromOther) {
  WorkerOptions options = PairOptions();
  const SequenceModel model(options, RandomTokens(1500, 3));
  const size_t page = size_t{4} * options.own_tiles().tiles() * options.tile_shape().int2_bytes();
  uint32_t seed = 0;
  for (const size_t slab : {4 * page, 1024 * page}) {
    for (const int kernel_layers : {0, 1, 99}) {
      SCOPED_TRACE(slab);
      SCOPED_TRACE(kernel_layers);
      MemoryClient cpu_store, store(slab / 4096 * 4096);
      SimulatedDevice device(seed++);
      {
        DeviceWorkerOptions sizes = SmallDevice();
        sizes.load_kernel_layers = kernel_layers;
        const auto cpu = Worker::Open(options, &cpu_store).value();
        const auto worker = OpenDeviceWorker(options, &store, device, sizes);
        DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
        ASSERT_TRUE(Eventually([&] { return device.pinned_ranges() > 0; }));
        for (const int prompt : {900, 1400, 1300}) {
          Twin twin(model, prompt, *cpu, *worker);
          EXPECT_EQ(twin.sequence().cached_tokens(), twin.expected().cached_tokens());
          RunPrompt(prompts, twin, 512);
          twin.Check();
          twin.Finish(prompts.batch());
          ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
          ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
        }
        EXPECT_EQ(worker->counters().verify_failures, 0u);
        EXPECT_GT(worker->counters().hit_tokens_host, 1000u);
      }
      EXPECT_EQ(device.fetched_from_host() > 0, kernel_layers > 0);
    }
  }
}

// A prefix that is copied is acquired in more parts than one that is attended in place: its first
// layer is copied with the first part.
TEST(DevicePrefixTest, CopiedPagesAreRequestedInFourParts) {
  WorkerOptions options = PairOptions();
  options.part_pages = 4;
  options.prompt_key_cache_tokens = 0;
  const SequenceModel model(options, RandomTokens(1500, 3));
  WorkerPair pair(options, 5);
  const auto cold = pair.cpu->Begin(model.prompt(1400)).value();
  model.Pass(*cold, 1400);
  ASSERT_TRUE(cold->Finish().ok());
  pair.Settle();
  const auto firsts = [&](MemoryClient& store, const auto& begin) {
    const size_t before = store.requests().size();
    begin();
    std::vector<uint32_t> found;
    const auto requests = store.requests();
    for (size_t i = before; i < requests.size(); ++i) found.push_back(requests[i].first_page);
    return found;
  };
  // Up to 1,144 tokens, 17 pages, may be cached.
  std::unique_ptr<DeviceSequence> hit;
  const auto worker = OpenDeviceWorker(options, &pair.cpu_store, pair.device, SmallDevice());
  EXPECT_THAT(firsts(pair.cpu_store, [&] { hit = BeginOn(*worker, model.prompt(1400)); }),
              testing::ElementsAre(0, 4, 8, 12));
  EXPECT_EQ(hit->stats().hit_tokens_host, 17 * kPageTokens);
  std::unique_ptr<Sequence> in_place;
  const auto cpu = Worker::Open(options, &pair.cpu_store).value();
  EXPECT_THAT(firsts(pair.cpu_store, [&] { in_place = cpu->Begin(model.prompt(1400)).value(); }),
              testing::ElementsAre(0, 8));
}

// An error of a thread that enqueues in the background fails the pass that waits for the load, and
// no other.
TEST(DevicePrefixTest, LoadsThatCannotBeEnqueuedFail) {
  const WorkerOptions options = PairOptions();
  const SequenceModel model(options, RandomTokens(1200, 3));
  WorkerPair pair(options, 3);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  {
    Twin cold(model, 1000, pair);
    RunPrompt(prompts, cold, 512);
    cold.Finish(prompts.batch());
    pair.Settle();
  }
  pair.device.copies_fail_from = 8;
  {
    const auto hit = BeginOn(*pair.worker, model.prompt(1200));
    EXPECT_EQ(hit->cached_tokens(), 896);
    const auto& loads = static_cast<const GpuSequence&>(*hit).loads;
    ASSERT_EQ(loads.size(), 1u);
    const OwnedStream stream = NewStream(pair.device).value();
    EXPECT_TRUE(absl::IsInternal(loads.front()->MakeWait(stream.get(), 0)));
    EXPECT_TRUE(absl::IsInternal(loads.front()->MakeWaitAll(stream.get())));
    EXPECT_EQ(loads.front()->Settle(), 0);
  }
  pair.device.copies_fail_from = SIZE_MAX;
  Twin again(model, 1200, pair);
  EXPECT_EQ(again.sequence().cached_tokens(), 896);
  RunPrompt(prompts, again, 512);
  again.Check();
}

// Room may end in any part of a prefix; the pages before are attended.
TEST(DevicePrefixTest, PrefixesEndWhereRoomDoes) {
  const WorkerOptions options = PairOptions();
  const SequenceModel model(options, RandomTokens(1200, 3));
  for (const int load_pages : {1, 2, 5, 6, 9, 13}) {
    for (const bool by_load : {false, true}) {
      SCOPED_TRACE(std::to_string(load_pages) + (by_load ? " of a load" : " slots"));
      MemoryClient store(64 << 20);
      SimulatedDevice device(static_cast<uint32_t>(load_pages));
      {
        const auto writer = OpenDeviceWorker(options, &store, device);
        DeviceRun prompts(device, *writer, {.kind = PassKind::kPrompt, .tokens = 512});
        auto first = BeginOn(*writer, model.prompt(1200));
        RunPrompt(prompts, *first, model, 1200);
        ASSERT_TRUE(prompts.batch().Finish(*first).ok());
        ASSERT_TRUE(writer->WaitPublished(kPatience).ok());
      }
      DeviceWorkerOptions sizes = SmallDevice();
      // A sink has a slot of its own kind.
      (by_load ? sizes.load_pages : sizes.pages) = by_load ? load_pages : load_pages - 1;
      sizes.pages = std::max(sizes.pages, 1);
      const int expected = by_load ? load_pages : sizes.pages + 1;
      const auto worker = OpenDeviceWorker(options, &store, device, sizes);
      ASSERT_TRUE(Eventually([&] { return device.pinned_ranges() > 0; }));
      const auto hit = BeginOn(*worker, model.prompt(1200));
      EXPECT_EQ(hit->cached_tokens(), 64 * expected);
      EXPECT_EQ(hit->stats().miss_reason, "busy");
      if (by_load) {
        DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
        RunPrompt(prompts, *hit, model, 1200);
      }
    }
  }
}

// Two live sequences with equal prefixes on two streams: the second attends the first one's pages.
TEST(DevicePrefixTest, LiveSequencesSharePages) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = PairOptions();
    const SequenceModel model(options, RandomTokens(1200, 3));
    SimulatedDevice device(seed);
    const auto worker = OpenDeviceWorker(options, nullptr, device);
    const auto cpu = Worker::Open(options, nullptr).value();
    DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun others(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
    Twin first(model, 1200, *cpu, *worker);
    RunPrompt(prompts, first, 512);
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    Twin second(model, 1100, *cpu, *worker);
    EXPECT_EQ(second.sequence().cached_tokens(), 832);
    EXPECT_EQ(second.expected().cached_tokens(), 832);
    RunPrompt(others, second, 512);
    first.Check();
    second.Check();
    EXPECT_EQ(worker->counters().hit_tokens_worker, 832u);
  }
}

TEST(DevicePrefixTest, DamagedPagesEndThePrompt) {
  for (const int damaged : {0, 1, 5}) {
    SCOPED_TRACE(damaged);
    WorkerOptions options = PairOptions();
    options.verify_every = 0;
    const SequenceModel model(options, RandomTokens(1200, 3));
    WorkerPair pair(options, 3);
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    {
      auto first = BeginOn(*pair.worker, model.prompt(1000));
      RunPrompt(prompts, *first, model, 1000);
      ASSERT_TRUE(prompts.batch().Finish(*first).ok());
      pair.Settle();
    }
    pair.DamagePages(static_cast<uint32_t>(damaged) + 1);
    const size_t stored = pair.device_store.pages();
    auto hit = BeginOn(*pair.worker, model.prompt(1200));
    EXPECT_EQ(hit->cached_tokens(), 896);
    absl::Status status;
    while (status.ok() && hit->length() < 1200) {
      const int tokens = hit->pass_tokens_max();
      status = prompts.TryPass({{hit.get(), &model, hit->length() + tokens, tokens}}).status();
      pair.Settle();  // the first passes' pages could be published now
    }
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("token " + std::to_string(64 * damaged)));
    EXPECT_TRUE(absl::IsFailedPrecondition(prompts.batch().Finish(*hit)));
    hit.reset();
    pair.Settle();
    EXPECT_EQ(pair.device_store.pages(), stored) << "pages computed over damaged ones were stored";
    EXPECT_EQ(pair.worker->counters().verify_failures, 1u);
    auto again = BeginOn(
        *pair.worker, model.prompt(1200),
        {.extra = {}, .publish = Publish::kAll, .deadline = {}, .cached_tokens_max = 64 * damaged});
    EXPECT_EQ(again->cached_tokens(), 64 * damaged);
    RunPrompt(prompts, *again, model, 1200);
  }
}

TEST(DevicePrefixTest, DamagedBf16PagesEndThePrompt) {
  WorkerOptions options = PairOptions();
  options.verify_every = 0;
  const SequenceModel model(options, RandomTokens(1200, 3));
  WorkerPair pair(options, 3);
  pair.SetState(KeyspaceState::kBf16);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  Twin first(model, 1000, pair);
  RunPrompt(prompts, first, 512);
  first.Finish(prompts.batch());
  pair.Settle();
  pair.DamagePages(4);
  const auto hit = BeginOn(*pair.worker, model.prompt(1200));
  EXPECT_EQ(hit->cached_tokens(), 896);
  absl::Status status;
  while (status.ok() && hit->length() < 1200) {
    const int tokens = hit->pass_tokens_max();
    status = prompts.TryPass({{hit.get(), &model, hit->length() + tokens, tokens}}).status();
  }
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("token 192"));
}

}  // namespace
}  // namespace crumb::client
