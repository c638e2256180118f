// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares the GPU back end on a simulated device with the CPU back end: the same tokens give the
// same outputs and the same published pages.
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/crowd.h"
#include "tests/client/gpu/twin.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

TEST(DeviceWorkerTest, OneSequenceIsAsOnTheCpu) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = PairOptions();
    const SequenceModel model(options, RandomTokens(800, 7));
    WorkerPair pair(options, seed);
    DeviceRun prompt(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 177});
    DeviceRun decode(pair.device, *pair.worker, {.kind = PassKind::kDecode});
    Twin twin(model, 600, pair);
    RunPrompt(prompt, twin, 177);
    RunDecode(decode, twin, 200);
    twin.Finish(decode.batch());
    twin.Check();
    pair.ExpectSamePages();
    EXPECT_EQ(pair.worker->counters().windows_evicted, pair.cpu->counters().windows_evicted);
    EXPECT_EQ(pair.worker->counters().published_pages, 12u);
  }
}

// Every other layer has a sliding window, and all query heads have sink logits. Decode passes need
// a plan for each of the two kinds of layers.
TEST(DeviceWorkerTest, SlidingWindowsAndSinkLogitsAreAsOnTheCpu) {
  WorkerOptions options = PairOptions();
  const WorkerOptions windowed = WindowedWorkerOptions();
  options.layers = windowed.layers;
  options.q_heads = windowed.q_heads;
  options.windows = windowed.windows;
  options.sink_logits = windowed.sink_logits;
  const SequenceModel model(options, RandomTokens(720, 9));
  WorkerPair pair(options, 1);
  DeviceRun prompt(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 300});
  DeviceRun decode(pair.device, *pair.worker, {.kind = PassKind::kDecode});
  decode.Capture(Simulated(pair.device));
  Twin twin(model, 600, pair);
  RunPrompt(prompt, twin, 300);
  RunDecode(decode, twin, 80);
  twin.Finish(decode.batch());
  twin.Check();
  pair.ExpectSamePages();
}

// Sequences of all lengths join and leave a decode batch whose passes are one captured graph, while
// prompts run on another stream, drafts are rejected, and sequences are forked.
TEST(DeviceWorkerTest, ManySequencesJoinAndLeave) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = PairOptions();
    DeviceWorkerOptions sizes = SmallDevice();
    if (seed == 1) sizes.scrub_pages_per_second = 2000;  // concurrent with everything else
    WorkerPair pair(options, seed, sizes);
    Crowd crowd(pair, options,
                {.prompts = {30, 520, 63, 700, 330, 1},
                 .tokens = 1000,
                 .models = 20,
                 .prompt_tokens = 300,
                 .sequences = 4},
                seed);
    for (int round = 0; round < 90; ++round) {
      if (!crowd.AllJoined() && crowd.live().size() < 3 && round % 8 == 0) crowd.Join();
      crowd.Round();
      if (seed == 1 && round == 30) {  // it is busy from here on
        ASSERT_TRUE(Eventually([&] { return pair.worker->counters().pages_scrubbed > 0; }));
      }
      if (round % 29 == 28) crowd.ForkFirst();
      if (round % 23 == 22) crowd.FinishFirst();
    }
    crowd.CheckAll();
    crowd.FinishAll();
    pair.ExpectSamePages();
    EXPECT_GT(pair.worker->counters().published_pages, 20u);
    EXPECT_EQ(pair.worker->counters().verify_failures, 0u);
  }
}

// One prompt's rows serve one prompt after the other while the decode stream, which copies the rows
// that it still needs, is far behind.
TEST(DeviceWorkerTest, RoomIsReusedBehindItsUsers) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = PairOptions();
    DeviceWorkerOptions sizes = SmallDevice();
    sizes.prompts = 1;
    sizes.pages = 64;
    sizes.passes_in_flight = 64;
    sizes.evict_results = 64;
    WorkerPair pair(options, seed, sizes);
    std::vector<SequenceModel> models;
    for (uint32_t i = 0; i < 5; ++i) models.emplace_back(options, RandomTokens(500, 40 + i));
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 400});
    DeviceRun decode(pair.device, *pair.worker, {});
    std::vector<std::unique_ptr<Twin>> twins;
    pair.device.HoldOthers();
    for (const SequenceModel& model : models) {
      twins.push_back(std::make_unique<Twin>(model, 400, pair));
      Twin& twin = *twins.back();
      RunPrompt(prompts, twin, 400);
      RunDecode(decode, twin, 3);
    }
    pair.device.ReleaseOthers();
    for (const auto& twin : twins) {
      twin->Check();
      twin->Finish(decode.batch());
    }
    twins.clear();
    pair.ExpectSamePages();
  }
}

TEST(DeviceWorkerTest, NoRoomChangesNothing) {
  const WorkerOptions options = PairOptions();
  const SequenceModel model(options, RandomTokens(1200, 3));
  DeviceWorkerOptions sizes = SmallDevice();
  sizes.pages = 9;
  sizes.sequences = 2;
  sizes.prompts = 1;
  WorkerPair pair(options, 2, sizes);
  DeviceRun prompts(pair.device, *pair.worker,
                    {.kind = PassKind::kPrompt, .sequences = 2, .tokens = 512});
  DeviceRun decode(pair.device, *pair.worker, {});
  const SequenceOptions kept{
      .extra = {}, .publish = Publish::kNone, .deadline = {}, .cached_tokens_max = {}};
  Twin twin(model, 700, pair, kept);
  Twin other(model, 1200, pair, kept);
  // There are rows for one prompt only.
  EXPECT_TRUE(absl::IsResourceExhausted(
      prompts.TryPass({twin.PromptEntry(100), other.PromptEntry(100)}).status()));
  RunPrompt(prompts, twin, 512);
  EXPECT_TRUE(absl::IsResourceExhausted(prompts.TryPass({other.PromptEntry(512)}).status()));
  // 700 tokens have 6 history pages; its prompt's rows are released with the first decode pass.
  PassOf(decode, {{&twin, twin.Entry(1, 1)}});
  PassOf(prompts, {{&other, other.PromptEntry(512)}});
  // The next block needs 7 pages, and 3 are free.
  const absl::Status full = prompts.TryPass({other.PromptEntry(512)}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_THAT(std::string(full.message()), testing::HasSubstr("pages in device memory"));
  RunDecode(decode, twin, 30);
  twin.Check();
  twin.Finish(decode.batch());
  ASSERT_TRUE(pair.worker->WaitPublished(kPatience).ok());
  while (other.length() < 1024) PassOf(prompts, {{&other, other.PromptEntry(512)}});
  other.Check();
}

// A window has NaN: no page from there on is published.
TEST(DeviceWorkerTest, WindowsThatAreNotFiniteStayHere) {
  for (const int bad : {10, 200}) {
    SCOPED_TRACE(bad);
    const WorkerOptions options = PairOptions();
    const SequenceModel model(options, RandomTokens(700, 3));
    WorkerPair pair(options, 1);
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    prompts.poisoned_position = bad;
    auto sequence = BeginOn(*pair.worker, model.prompt(700));
    RunPrompt(prompts, *sequence, model, 700);
    ASSERT_TRUE(prompts.batch().Finish(*sequence).ok());
    pair.Settle();
    EXPECT_EQ(pair.device_store.pages(), static_cast<size_t>(bad / 64));
    EXPECT_EQ(pair.worker->counters().windows_refused, 1u);
    EXPECT_EQ(BeginOn(*pair.worker, model.prompt(700))->cached_tokens(), bad / 64 * 64);
  }
}

// crumbd goes and comes: sequences continue, and pages that could not be published are counted.
TEST(DeviceWorkerTest, GoesOnWithoutCrumbd) {
  const WorkerOptions options = PairOptions();
  const SequenceModel model(options, RandomTokens(1200, 3));
  WorkerPair pair(options, 5);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(pair.device, *pair.worker, {});
  Twin twin(model, 900, pair);
  PassOf(prompts, {{&twin, twin.PromptEntry(512)}});
  pair.Settle();
  pair.device_store.up = false;
  RunPrompt(prompts, twin, 512);
  RunDecode(decode, twin, 70);
  twin.Check();
  twin.Finish(decode.batch());
  pair.Settle();
  EXPECT_GT(pair.worker->counters().publish_dropped_unavailable, 5u);
  pair.device_store.up = true;
  Twin next(model, 900, pair);
  EXPECT_EQ(next.sequence().cached_tokens(), 64);  // pages published before
}

TEST(DeviceWorkerTest, LeavesNothingBehind) {
  const WorkerOptions options = PairOptions();
  const SequenceModel model(options, RandomTokens(700, 3));
  WorkerPair pair(options, 0);
  for (int i = 0; i < 200; ++i) {
    auto sequence = BeginOn(*pair.worker, model.prompt(600));
    if (i % 50 > 0) continue;
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    RunPrompt(prompts, *sequence, model, 600);
    ASSERT_TRUE(prompts.batch().Finish(*sequence).ok());
    pair.Settle();
  }
  pair.Settle();
  // Loads of prefixes that are not attended end in the background, and so do their leases.
  EXPECT_TRUE(Eventually([&] { return pair.device_store.leases() == 0; }));
  pair.worker.reset();
  EXPECT_EQ(pair.device.live_allocations(), 0u);
  EXPECT_EQ(pair.device.live_handles(), 0u);
}

TEST(DeviceWorkerTest, RefusesWhatItDoesNotServe) {
  SimulatedDevice device(0);
  const auto code = [&](const WorkerOptions& options, const DeviceWorkerOptions& sizes) {
    return DeviceWorker::Open(options, sizes, nullptr, device).status().code();
  };
  WorkerOptions drafts = PairOptions();
  drafts.draft_slots = 8;
  EXPECT_EQ(code(drafts, SmallDevice()), absl::StatusCode::kInvalidArgument);
  DeviceWorkerOptions none = SmallDevice();
  none.prompts = 0;
  EXPECT_EQ(code(PairOptions(), none), absl::StatusCode::kInvalidArgument);
  DeviceWorkerOptions negative = SmallDevice();
  negative.bf16_pages = -1;
  EXPECT_EQ(code(PairOptions(), negative), absl::StatusCode::kInvalidArgument);
  SimulatedDevice small(0, 1 << 20);
  EXPECT_EQ(DeviceWorker::Open(PairOptions(), SmallDevice(), nullptr, small).status().code(),
            absl::StatusCode::kResourceExhausted);

  const auto worker = OpenDeviceWorker(PairOptions(), nullptr, device);
  EXPECT_EQ(worker->NewBatch({.tokens = 9}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(worker->NewBatch({.sequences = 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(worker->Begin({}).status().code(), absl::StatusCode::kInvalidArgument);

  const SequenceModel model(PairOptions(), RandomTokens(700, 3));
  DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 100});
  DeviceRun decode(device, *worker, {});
  const auto sequence = BeginOn(*worker, model.prompt(600));
  const auto prepare = [&](DeviceBatch& batch, std::vector<PassEntry> entries) {
    return batch.Prepare(entries).code();
  };
  EXPECT_EQ(prepare(decode.batch(), {{sequence.get(), 1}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(prepare(prompts.batch(), {{sequence.get(), 101}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(prepare(prompts.batch(), {{sequence.get(), 0}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(prepare(prompts.batch(), {}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(prompts.batch().Advance({}).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(prepare(prompts.batch(), {{sequence.get(), 10}}), absl::StatusCode::kOk);
  EXPECT_EQ(prepare(prompts.batch(), {{sequence.get(), 10}}),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(prompts.batch().Fork(*sequence).status().code(), absl::StatusCode::kFailedPrecondition);
  const std::vector<int32_t> wrong(10, -1), many(11, 0);
  const std::span<const int32_t> wrong_ids[] = {wrong}, too_many[] = {many}, none_kept[] = {{}};
  EXPECT_EQ(prompts.batch().Advance(wrong_ids).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(prompts.batch().Advance(too_many).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(prompts.batch().Advance(none_kept).code(), absl::StatusCode::kOk);
  EXPECT_EQ(sequence->length(), 0);
}

TEST(DeviceWorkerTest, RefusesSequencesOfAnotherWorker) {
  SimulatedDevice device(0);
  const auto worker = OpenDeviceWorker(PairOptions(), nullptr, device);
  const auto other = OpenDeviceWorker(PairOptions(), nullptr, device);
  const SequenceModel model(PairOptions(), RandomTokens(700, 3));
  DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 100});
  const auto foreign = BeginOn(*other, model.prompt(600));
  const PassEntry entry = {foreign.get(), 10};
  for (const absl::Status& status :
       {prompts.batch().Prepare(std::span(&entry, 1)), prompts.batch().Fork(*foreign).status(),
        prompts.batch().Finish(*foreign)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("another worker"));
  }
}

TEST(DeviceWorkerTest, RotationsWithMeansFeedbackAndShifts) {
  WorkerOptions options = PairOptions();
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  RotationSet::Arrays arrays = RandomMeans(random);
  arrays.shift.resize(2 * 4);
  for (float& value : arrays.shift) value = normal(random);
  arrays.feedback_k.assign(2 * 2 * 64 * 64, 0.0f);
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int i = 0; i < 64; ++i) {
      for (int j = i + 1; j < 64; ++j) {
        arrays.feedback_k[(matrix * 64 + i) * 64 + j] = 0.1f * normal(random);
      }
    }
  }
  arrays.feedback_v = arrays.feedback_k;
  // Hadamard matrices with stretched columns, which are not orthogonal, and their duals.
  const auto hadamard = RotationSet::Hadamard(64)->Expand(1, 1)[0];
  for (int i = 0; i < 4 * 64 * 64; ++i) {
    const float stretch = i % 64 < 40 ? 0.7f : 1.4f, value = hadamard->rotation_k()[i % (64 * 64)];
    arrays.rotation_k.push_back(value * stretch);
    arrays.dual_k.push_back(value / stretch);
    arrays.rotation_v.push_back(value / stretch);
    arrays.dual_v.push_back(value * stretch);
  }
  options.method = kernels::Method::kCrumb;
  options.rotations = RotationSet::Of("test", std::move(arrays)).value();
  const SequenceModel model(options, RandomTokens(900, 3));
  WorkerPair pair(options, 4);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(pair.device, *pair.worker, {});
  Twin twin(model, 800, pair);
  RunPrompt(prompts, twin, 400);
  RunDecode(decode, twin, 70);
  twin.Check();
  twin.Finish(decode.batch());
  pair.ExpectSamePages();
}

}  // namespace
}  // namespace crumb::client
