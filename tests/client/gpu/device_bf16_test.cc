// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of a GPU worker whose sequences have BF16 history, from the start or after INT2 was given
// up.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/crowd.h"
#include "tests/client/gpu/twin.h"

namespace crumb::client {
namespace {

int Bf16PagesOf(const MemoryClient& store) {
  int pages = 0;
  for (const auto& [key, bytes] : store.contents()) {
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes)));
    EXPECT_TRUE(header.ok()) << header.status();
    if (!header.ok()) continue;
    pages += header->format == crumb::PageFormat::kBf16 && header->position > 1;
  }
  return pages;
}

// INT2 is given up while sequences run: these continue with INT2, new ones in the same captured
// passes have BF16 history, and afterwards INT2 is switched on again.
TEST(DeviceBf16Test, SequencesOfBothFormatsShareABatch) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = PairOptions();
    WorkerPair pair(options, seed);
    Crowd crowd(pair, options,
                {.prompts = {700, 330, 1100, 30, 600, 900},
                 .tokens = 1200,
                 .models = 60,
                 .prompt_tokens = 400,
                 .sequences = 6},
                seed);
    for (int round = 0; round < 72; ++round) {
      if (round == 18) pair.SetState(KeyspaceState::kBf16);
      if (round == 54) pair.SetState(KeyspaceState::kActive);
      if (round % 11 == 0 && !crowd.AllJoined()) crowd.Join();
      crowd.Round();
    }
    crowd.CheckAll();
    int bf16 = 0;
    for (const auto& twin : crowd.live()) {
      const SequenceStats ours = twin->sequence().stats(), theirs = twin->expected().stats();
      EXPECT_EQ(ours.held_bytes, theirs.held_bytes);
      EXPECT_EQ(ours.stored_bytes, theirs.stored_bytes);
      bf16 += ours.bits_per_element() == 16.0 && twin->length() > 400;
    }
    EXPECT_EQ(bf16, 2);
    crowd.FinishAll();
    pair.ExpectSamePages();
    EXPECT_GT(Bf16PagesOf(pair.device_store), 10);
    EXPECT_EQ(pair.worker->counters().windows_evicted, pair.cpu->counters().windows_evicted);
  }
}

// Each sequence hits the pages published before it; rows are forked with their pages.
TEST(DeviceBf16Test, Bf16HistoryIsFetchedAndForked) {
  for (const int kernel_layers : {0, 1, 99}) {
    SCOPED_TRACE(kernel_layers);
    const WorkerOptions options = PairOptions();
    const SequenceModel model(options, RandomTokens(1800, 9));
    DeviceWorkerOptions sizes = SmallDevice();
    sizes.load_kernel_layers = kernel_layers;
    WorkerPair pair(options, 3 + kernel_layers % 2, sizes);
    pair.device.everything_pinned = true;
    pair.SetState(KeyspaceState::kBf16);
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun decode(pair.device, *pair.worker, {.sequences = 2});
    int cached = 0;
    for (const int prompt : {1000, 1300, 1700}) {
      pair.device.HoldOthers();
      Twin twin(model, prompt, pair);
      EXPECT_EQ(twin.sequence().cached_tokens(), twin.expected().cached_tokens());
      EXPECT_EQ(twin.sequence().cached_tokens() > 0, prompt > 1000);
      cached += twin.sequence().cached_tokens();
      RunPrompt(prompts, twin, 512);
      RunDecode(decode, twin, 10);
      Twin fork = twin.Fork(decode.batch());
      for (int i = 0; i < 70; ++i) {
        PassOf(decode, {{&twin, twin.Entry(1, 1)}, {&fork, fork.Entry(1, 1)}});
      }
      pair.device.ReleaseOthers();
      twin.Check();
      fork.Check();
      twin.Finish(decode.batch());
      fork.Finish(decode.batch());
      pair.ExpectSamePages();
    }
    EXPECT_EQ(pair.worker->counters().hit_tokens_host, static_cast<uint64_t>(cached));
    EXPECT_EQ(pair.worker->counters().verify_failures, 0u);
  }
}

// BF16 pages take memory only when they are needed; without memory, sequences fail with an error.
TEST(DeviceBf16Test, Bf16PagesNeedMemoryWhenTheyAreUsed) {
  const WorkerOptions options = PairOptions();
  const SequenceModel model(options, RandomTokens(1200, 3));
  DeviceWorkerOptions sizes = SmallDevice();
  sizes.bf16_pages = 6;
  WorkerPair pair(options, 1, sizes);
  const size_t before = pair.device.live_allocations();
  BeginOn(*pair.worker, model.prompt(700));
  EXPECT_EQ(pair.device.live_allocations(), before);
  pair.SetState(KeyspaceState::kBf16);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  const size_t with_run = pair.device.live_allocations();
  {
    Twin twin(model, 1200, pair);
    EXPECT_EQ(pair.device.live_allocations(), with_run + 1);
    PassOf(prompts, {{&twin, twin.PromptEntry(512)}});
    const absl::Status full = prompts.TryPass({twin.PromptEntry(512)}).status();
    EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
    EXPECT_THAT(std::string(full.message()), testing::HasSubstr("BF16 pages in device memory"));
    twin.Check();
  }
  for (const int pages : {0, 1 << 20}) {
    sizes.bf16_pages = pages;
    MemoryClient store;
    SimulatedDevice device(0, size_t{256} << 20);
    const auto worker = OpenDeviceWorker(options, &store, device, sizes);
    for (const KeyspaceId& keyspace : store.int2_keyspaces()) {
      ASSERT_TRUE(store.SetKeyspaceState(keyspace, KeyspaceState::kBf16, "", "").ok());
    }
    const absl::Status none = worker->Begin(model.prompt(700)).status();
    EXPECT_TRUE(absl::IsResourceExhausted(none)) << none;
    EXPECT_THAT(std::string(none.message()), testing::HasSubstr("bf16_pages"));
  }
}

// A worker that stores BF16 by its options.
TEST(DeviceBf16Test, Bf16WorkersAreAsOnTheCpu) {
  WorkerOptions options = PairOptions();
  options.history_format = kernels::PageFormat::kBf16;
  const SequenceModel model(options, RandomTokens(900, 3));
  WorkerPair pair(options, 2);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(pair.device, *pair.worker, {});
  Twin twin(model, 700, pair);
  RunPrompt(prompts, twin, 300);
  RunDecode(decode, twin, 130);
  twin.Check();
  twin.Finish(decode.batch());
  pair.ExpectSamePages();
}

}  // namespace
}  // namespace crumb::client
