// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares the samples that a GPU worker measures with those of the CPU back end.
#include <algorithm>
#include <random>

#include "client/cpu/cpu_backend.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/client/gpu/twin.h"

namespace crumb::client {
namespace {

// Options with means, so that decode passes compute offsets.
WorkerOptions CentredOptions() {
  WorkerOptions options = PairOptions();
  std::mt19937 random(5);
  options.rotations = RotationSet::Of("centred", RandomMeans(random)).value();
  return options;
}

// Returns the samples of the window of page `page`, measured on the CPU with the queries of tokens
// [begin, end).
std::vector<QualitySample> Measured(const WorkerOptions& options, const SequenceModel& model,
                                    const MemoryClient& store, int page, int head, int begin,
                                    int end) {
  std::string tiles;
  for (const auto& [key, bytes] : store.contents()) {
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes)));
    EXPECT_TRUE(header.ok()) << header.status();
    if (header.ok() && header->position == static_cast<uint32_t>(page) + 1) {
      tiles = bytes.substr(FragmentHeaderBytes(header->range.tiles()));
    }
  }
  const size_t tile = options.tile_shape().int2_bytes();
  EXPECT_EQ(tiles.size(), tile * options.own_tiles().tiles()) << "page " << page;
  if (tiles.empty()) return {};
  const CpuBackend backend(options);
  const int dim = options.head_dim, group = options.q_heads / options.kv_heads;
  std::vector<QualitySample> samples;
  for (int layer = 0; layer < options.layers; ++layer) {
    const auto k = model.Keys(layer, 64 * page, 64 * page + 64);
    const auto v = model.Values(layer, 64 * page, 64 * page + 64);
    std::vector<float> queries;
    const auto q = model.Queries(layer, begin, end);
    for (int t = 0; t < end - begin; ++t) {
      const kernels::Bf16* from = &q[(t * options.q_heads + head * group) * dim];
      std::transform(from, from + group * dim, std::back_inserter(queries),
                     [](kernels::Bf16 x) { return kernels::Bf16ToFloat(x); });
    }
    samples.push_back(backend.Measure(
        {.k = &k[head * dim], .v = &v[head * dim], .stride = int64_t{options.kv_heads} * dim},
        64 * page, layer, head,
        reinterpret_cast<std::byte*>(tiles.data()) + tile * (layer * options.kv_heads + head),
        queries));
  }
  return samples;
}

void ExpectSamples(const std::vector<QualitySample>& got,
                   const std::vector<QualitySample>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].layer, expected[i].layer) << i;
    EXPECT_FLOAT_EQ(got[i].attention_error, expected[i].attention_error) << i;
    EXPECT_FLOAT_EQ(got[i].key_error, expected[i].key_error) << i;
    EXPECT_FLOAT_EQ(got[i].value_error, expected[i].value_error) << i;
    EXPECT_GT(got[i].attention_error, 0.01f) << i;
  }
}

// Windows of a prompt are measured with the queries of the pass after which they are evicted: at
// the end of each block and of the prompt, as the CPU worker does.
TEST(DeviceWatchTest, WindowsOfPromptsAreMeasured) {
  WorkerOptions options = PairOptions();
  options.watch_every = 1;
  const SequenceModel model(options, RandomTokens(1300, 3));
  WorkerPair pair(options, 5);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 300});
  DeviceRun decode(pair.device, *pair.worker, {});
  Twin twin(model, 1290, pair);
  std::vector<QualitySample> expected;
  const auto settle = [&](int page, int head, int begin, int end) {
    pair.Settle();
    const auto more = Measured(options, model, pair.device_store, page, head, begin, end);
    expected.insert(expected.end(), more.begin(), more.end());
    ExpectSamples(pair.device_store.quality(), expected);
  };
  while (twin.length() < 512) PassOf(prompts, {{&twin, twin.PromptEntry(300)}});
  pair.Settle();
  EXPECT_TRUE(pair.device_store.quality().empty());  // the windows were not evicted yet
  while (twin.length() < 1024) PassOf(prompts, {{&twin, twin.PromptEntry(300)}});
  settle(1, 0, 508, 512);
  PassOf(prompts, {{&twin, twin.PromptEntry(300)}});
  settle(8, 1, 1020, 1024);
  // The last block's windows are recent ones up to the first that is not.
  PassOf(decode, {{&twin, twin.Entry(1, 1)}});
  pair.Settle();
  EXPECT_EQ(pair.device_store.quality().size(), 4u);
  EXPECT_EQ(pair.worker->counters().windows_measured, 2u);
  twin.Check();
  twin.Finish(decode.batch());
  pair.ExpectSamePages();
}

TEST(DeviceWatchTest, WindowsAtAPromptsEndAreMeasuredAsOnTheCpu) {
  for (const bool centred : {false, true}) {
    SCOPED_TRACE(centred);
    WorkerOptions options = centred ? CentredOptions() : PairOptions();
    options.watch_every = 1;
    const SequenceModel model(options, RandomTokens(800, 3));
    WorkerPair pair(options, 6);
    DeviceRun prompts(pair.device, *pair.worker,
                      {.kind = PassKind::kPrompt, .sequences = 2, .tokens = 500});
    DeviceRun decode(pair.device, *pair.worker, {.sequences = 2});
    decode.Capture(Simulated(pair.device));
    Twin other(model, 200, pair);
    Twin twin(model, 450, pair);
    PassOf(prompts, {{&other, other.PromptEntry(500)}, {&twin, twin.PromptEntry(500)}});
    PassOf(decode, {{&other, other.Entry(1, 1)}, {&twin, twin.Entry(1, 1)}});
    pair.Settle();
    std::vector<QualitySample> theirs = pair.cpu_store.quality();
    ASSERT_GE(theirs.size(), 2u);
    theirs.resize(2);  // one of all windows of the prompt is measured here
    ExpectSamples(pair.device_store.quality(), theirs);
    twin.Check();
    other.Check();
  }
}

// In captured passes the kernel that computes the offsets also keeps the queries, if it runs.
TEST(DeviceWatchTest, WindowsOfDecodePassesAreMeasured) {
  for (const int tokens : {1, 3, 7}) {
    SCOPED_TRACE(tokens);
    WorkerOptions options = CentredOptions();
    options.watch_every = 1;
    const SequenceModel model(options, RandomTokens(900, 3)), idle(options, RandomTokens(900, 4));
    WorkerPair pair(options, 7 + tokens);
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun decode(pair.device, *pair.worker, {.sequences = 3, .tokens = tokens});
    decode.Capture(Simulated(pair.device));
    Twin first(idle, 20, pair);
    Twin twin(model, 300, pair);
    for (Twin* one : {&first, &twin}) {
      while (one->InPrompt()) PassOf(prompts, {{one, one->PromptEntry(512)}});
    }
    std::vector<QualitySample> expected;
    int pages = 1;  // including the sink
    for (int windows = 0; windows < 5;) {
      const int begin = twin.length(), end = begin + tokens;
      PassOf(decode, {{&first, first.Entry(tokens, 0)}, {&twin, twin.Entry(tokens, tokens)}});
      pair.Settle();
      if (static_cast<int>(pair.device_store.pages()) == pages) continue;
      ++pages;
      const int held = std::min(tokens, 4);
      const auto more =
          Measured(options, model, pair.device_store, pages - 1, windows % 2, end - held, end);
      expected.insert(expected.end(), more.begin(), more.end());
      ++windows;
      ExpectSamples(pair.device_store.quality(), expected);
      ASSERT_LT(begin, 800);
    }
    EXPECT_EQ(pair.worker->counters().windows_measured, 5u);
    twin.Check();
  }
}

// Options of a sequence that hits nothing.
const SequenceOptions kCold{
    .extra = {}, .publish = Publish::kAll, .deadline = {}, .cached_tokens_max = 0};

// Windows that are not finite are not measured, and abandoned samples are reused.
TEST(DeviceWatchTest, TheWatchIsBoundedAndLetsGo) {
  WorkerOptions options = CentredOptions();
  options.watch_every = 1;
  const SequenceModel model(options, RandomTokens(900, 3));
  SimulatedDevice device(3);
  MemoryClient store;
  {
    const auto worker = OpenDeviceWorker(options, &store, device);
    DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .sequences = 4, .tokens = 512});
    DeviceRun decode(device, *worker, {.sequences = 4});
    for (int round = 0; round < 5; ++round) {
      // Queries are kept for a sequence that is dropped before its windows are evicted.
      const auto dropped = BeginOn(*worker, model.prompt(500), kCold);
      prompts.Pass({{dropped.get(), &model, 500, 500}});
    }
    EXPECT_EQ(worker->counters().windows_measured, 0u);
    auto given_up = BeginOn(*worker, model.prompt(500), kCold);
    prompts.Pass({{given_up.get(), &model, 500, 0}});
    given_up.reset();
    prompts.poisoned_position = 70;  // the head that is measured next has it
    const auto bad = BeginOn(*worker, model.prompt(450), kCold);
    prompts.Pass({{bad.get(), &model, 450, 450}});
    decode.Pass({{bad.get(), &model, 451, 1}});
    prompts.poisoned_position = -1;
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    EXPECT_EQ(worker->counters().windows_refused, 1u);
    EXPECT_EQ(worker->counters().windows_measured, 0u);
    // More windows at once than there are samples.
    std::vector<std::unique_ptr<DeviceSequence>> sequences;
    std::vector<RunEntry> entries, next;
    for (int i = 0; i < 4; ++i) {
      sequences.push_back(BeginOn(*worker, model.prompt(450 + i), kCold));
      entries.push_back({sequences.back().get(), &model, 450 + i, 450 + i});
      next.push_back({sequences.back().get(), &model, 451 + i, 1});
    }
    prompts.Pass(entries);
    decode.Pass(next);
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    EXPECT_EQ(worker->counters().windows_measured, 2u);
    EXPECT_EQ(store.quality().size(), 4u);
  }
  EXPECT_EQ(device.live_allocations(), 0u);
  EXPECT_EQ(device.live_handles(), 0u);
}

// The watch gives INT2 up; new sequences store BF16 on the device until an operator switches INT2
// on.
TEST(DeviceWatchTest, TheWatchGivesInt2Up) {
  WorkerOptions options = PairOptions();
  options.watch_every = 1;
  options.watch_windows = 4;
  options.watch_error_max = 0.01f;  // INT2 errors are always larger
  const SequenceModel model(options, RandomTokens(1300, 3));
  SimulatedDevice device(1);
  MemoryClient store;
  const auto worker = OpenDeviceWorker(options, &store, device);
  DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(device, *worker, {});
  const auto bits = [&](int prompt) {
    const auto sequence = BeginOn(*worker, model.prompt(prompt), kCold);
    while (sequence->length() < prompt) {
      const int tokens = sequence->pass_tokens_max();
      prompts.Pass({{sequence.get(), &model, sequence->length() + tokens, tokens}});
    }
    decode.Pass({{sequence.get(), &model, prompt + 1, 1}});
    const double stored_bits = sequence->stats().bits_per_element();
    EXPECT_TRUE(decode.batch().Finish(*sequence).ok());
    EXPECT_TRUE(worker->WaitPublished(kPatience).ok());
    return stored_bits;
  };
  // One window of each block is measured, and at the prompts' ends.
  for (int prompt = 700; worker->counters().quality_alarms == 0 && prompt < 1300; prompt += 100) {
    EXPECT_LT(bits(prompt), 16.0);
  }
  EXPECT_EQ(worker->counters().quality_alarms, 1u);
  EXPECT_EQ(worker->counters().windows_measured, 4u);
  EXPECT_EQ(bits(1200), 16.0);
  ASSERT_EQ(store.int2_keyspaces().size(), 1u);
  const KeyspaceId int2 = store.int2_keyspaces().front();
  EXPECT_EQ(store.StateOf(int2), KeyspaceState::kBf16);
  EXPECT_EQ(bits(1250), 16.0);
  EXPECT_EQ(worker->counters().windows_measured, 4u);  // there is nothing to measure
  ASSERT_TRUE(store.SetKeyspaceState(int2, KeyspaceState::kActive, "operator", "").ok());
  EXPECT_LT(bits(1270), 16.0);
}

}  // namespace
}  // namespace crumb::client
