// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The device back end on a simulated device against the CPU back end: the same tokens give the same
// outputs and the same published pages.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <thread>

#include "client/cpu_backend.h"
#include "client/device/owned.h"
#include "client/device/resident_sequence.h"
#include "crumb/device_worker.h"
#include "crumb/worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/client/device/device_run.h"
#include "tests/client/device/simulated_device.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

constexpr Duration kPatience = std::chrono::seconds(60);

WorkerOptions Options() {
  WorkerOptions options = SmallWorkerOptions();
  options.draft_slots = 7;
  options.watch_every = 0;
  return options;
}

DeviceWorkerOptions SmallDevice() {
  DeviceWorkerOptions options;
  options.pages = 128;
  options.sequences = 8;
  options.prompts = 4;
  options.load_pages = 64;
  return options;
}

std::unique_ptr<DeviceWorker> OpenDevice(const WorkerOptions& options, Client* client,
                                         SimulatedDevice& device,
                                         const DeviceWorkerOptions& sizes = SmallDevice()) {
  auto worker = DeviceWorker::Open(options, sizes, client, device);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return std::move(worker).value();
}

std::unique_ptr<DeviceSequence> Begin(DeviceWorker& worker, std::span<const int32_t> prompt,
                                      const SequenceOptions& options = {}) {
  auto sequence = worker.Begin(prompt, options);
  EXPECT_TRUE(sequence.ok()) << sequence.status();
  return std::move(sequence).value();
}

void ExpectSame(const std::vector<float>& got, const std::vector<float>& expected,
                const std::string& where) {
  ASSERT_EQ(got.size(), expected.size());
  double worst = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::isfinite(got[i])) << where << " element " << i;
    worst = std::max<double>(worst, std::abs(got[i] - expected[i]));
  }
  EXPECT_LT(worst, 2e-5) << where;
}

// The same keys, headers and tiles; says how many differ, not how.
void ExpectSameStores(const MemoryClient& got, const MemoryClient& expected) {
  const std::map<PageKey, std::string> ours = got.contents(), theirs = expected.contents();
  EXPECT_EQ(ours.size(), theirs.size());
  int differ = 0;
  for (const auto& [key, bytes] : ours) {
    const auto found = theirs.find(key);
    differ += found == theirs.end() || found->second != bytes;
  }
  EXPECT_EQ(differ, 0);
}

TEST(DeviceWorkerTest, OneSequenceIsAsOnTheCpu) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = Options();
    const SequenceModel model(options, RandomTokens(800, 7));
    MemoryClient cpu_store, device_store;
    {
      SimulatedDevice device(seed);
      {
        auto cpu = Worker::Open(options, &cpu_store).value();
        auto worker = OpenDevice(options, &device_store, device);
        DeviceRun prompt(device, *worker, {.kind = PassKind::kPrompt, .tokens = 177});
        DeviceRun decode(device, *worker, {.kind = PassKind::kDecode});
        auto expected = cpu->Begin(model.prompt(600)).value();
        auto sequence = Begin(*worker, model.prompt(600));
        std::vector<std::pair<std::shared_ptr<RunPass>, std::vector<float>>> passes;
        while (sequence->length() < 800) {
          const int begin = sequence->length();
          DeviceRun& run = begin < 600 ? prompt : decode;
          const int end = begin + std::min(begin < 600 ? 177 : 1, sequence->pass_tokens_max());
          auto pass = run.Pass({{sequence.get(), &model, end, end - begin}});
          passes.emplace_back(std::move(pass), model.Pass(*expected, end));
        }
        ASSERT_TRUE(expected->Finish().ok());
        ASSERT_TRUE(decode.batch().Finish(*sequence).ok());
        sequence.reset();
        int number = 0;
        for (const auto& [pass, outputs] : passes) {
          ExpectSame(pass->Outputs(0), outputs, "pass " + std::to_string(number++));
        }
        ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
        ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
        EXPECT_EQ(worker->counters().windows_evicted, cpu->counters().windows_evicted);
        EXPECT_EQ(worker->counters().published_pages, 12u);
      }
    }
    ExpectSameStores(device_store, cpu_store);
  }
}

// A request that is made on both back ends at once, pass by pass.
class Twin {
 public:
  Twin(const SequenceModel& model, int prompt, Worker& cpu, DeviceWorker& worker,
       const SequenceOptions& options = {})
      : model_(&model), prompt_(prompt) {
    expected_ = cpu.Begin(model.prompt(prompt), options).value();
    sequence_ = Begin(worker, model.prompt(prompt), options);
  }
  Twin(Twin&&) = default;
  Twin& operator=(Twin&&) = default;

  int length() const { return sequence_->length(); }
  bool InPrompt() const { return length() < prompt_; }
  DeviceSequence& sequence() { return *sequence_; }
  Sequence& expected() { return *expected_; }

  // Of `tokens` fresh ones, `accepted` stay.
  RunEntry Entry(int tokens, int accepted) const {
    return {sequence_.get(), model_, length() + tokens, accepted};
  }
  RunEntry PromptEntry(int tokens_max) const {
    const int tokens = std::min(tokens_max, sequence_->pass_tokens_max());
    return Entry(tokens, tokens);
  }
  // The same pass on the CPU; to be made before the device's. Kept for Check.
  void Expect(const RunEntry& entry) {
    outputs_.push_back(model_->Pass(*expected_, entry.end, entry.accepted));
  }
  void Note(std::shared_ptr<RunPass> pass, size_t entry) { passes_.emplace_back(pass, entry); }
  void Check() const {
    ASSERT_EQ(outputs_.size(), passes_.size());
    for (size_t i = 0; i < passes_.size(); ++i) {
      ExpectSame(passes_[i].first->Outputs(passes_[i].second), outputs_[i],
                 "pass " + std::to_string(i));
    }
  }
  Twin Fork(DeviceBatch& batch) {
    Twin fork;
    fork.model_ = model_;
    fork.prompt_ = prompt_;
    fork.expected_ = expected_->Fork().value();
    auto forked = batch.Fork(*sequence_);
    EXPECT_TRUE(forked.ok()) << forked.status();
    fork.sequence_ = std::move(forked).value();
    return fork;
  }
  void GoOnWith(const SequenceModel& model) { model_ = &model; }
  void Finish(DeviceBatch& batch) {
    EXPECT_TRUE(expected_->Finish().ok());
    EXPECT_TRUE(batch.Finish(*sequence_).ok());
    sequence_.reset();
  }

 private:
  Twin() = default;
  const SequenceModel* model_ = nullptr;
  int prompt_ = 0;
  std::unique_ptr<Sequence> expected_;
  std::unique_ptr<DeviceSequence> sequence_;
  std::vector<std::vector<float>> outputs_;
  std::vector<std::pair<std::shared_ptr<RunPass>, size_t>> passes_;
};

// Makes one pass of the twins on both sides.
void PassOf(DeviceRun& run, std::vector<std::pair<Twin*, RunEntry>> shares) {
  std::vector<RunEntry> entries;
  for (auto& [twin, entry] : shares) {
    twin->Expect(entry);
    entries.push_back(entry);
  }
  const auto pass = run.Pass(entries);
  for (size_t i = 0; i < shares.size(); ++i) shares[i].first->Note(pass, i);
}

// Both workers and what they publish to.
struct Pair {
  explicit Pair(const WorkerOptions& options, uint32_t seed,
                const DeviceWorkerOptions& sizes = SmallDevice())
      : device(seed),
        cpu(Worker::Open(options, &cpu_store).value()),
        worker(OpenDevice(options, &device_store, device, sizes)) {}
  void Settle() {
    EXPECT_TRUE(cpu->WaitPublished(kPatience).ok());
    EXPECT_TRUE(worker->WaitPublished(kPatience).ok());
  }
  void ExpectSamePages() {
    Settle();
    ExpectSameStores(device_store, cpu_store);
  }
  MemoryClient cpu_store, device_store;
  SimulatedDevice device;
  std::unique_ptr<Worker> cpu;
  std::unique_ptr<DeviceWorker> worker;
};

// Sequences of all lengths join and leave a decode batch whose passes are one captured graph, with
// prompts between on another stream, drafts that are rejected, and forks.
TEST(DeviceWorkerTest, ManySequencesJoinAndLeave) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = Options();
    Pair pair(options, seed);
    std::mt19937 random(seed);
    std::vector<SequenceModel> models;
    for (uint32_t i = 0; i < 6; ++i) models.emplace_back(options, RandomTokens(1000, 20 + i));
    DeviceRun prompts(pair.device, *pair.worker,
                      {.kind = PassKind::kPrompt, .sequences = 3, .tokens = 300});
    DeviceRun decode(pair.device, *pair.worker,
                     {.kind = PassKind::kDecode, .sequences = 4, .tokens = 3});
    decode.Capture(Simulated(pair.device));
    std::vector<std::unique_ptr<Twin>> live;
    size_t begun = 0;
    const int lengths[] = {30, 520, 63, 700, 330, 1};
    for (int round = 0; round < 90; ++round) {
      if (begun < models.size() && live.size() < 3 && round % 8 == 0) {
        live.push_back(
            std::make_unique<Twin>(models[begun], lengths[begun], *pair.cpu, *pair.worker));
        ++begun;
      }
      std::vector<std::pair<Twin*, RunEntry>> in_prompt, behind;
      for (const auto& twin : live) {
        if (twin->InPrompt()) {
          in_prompt.emplace_back(twin.get(), twin->PromptEntry(1 + random() % 300));
        } else {
          behind.emplace_back(twin.get(), twin->Entry(3, random() % 4));
        }
      }
      if (!in_prompt.empty()) PassOf(prompts, in_prompt);
      if (!behind.empty()) PassOf(decode, behind);
      if (round % 29 == 28 && !live.empty() && !live.front()->InPrompt()) {
        live.push_back(std::make_unique<Twin>(live.front()->Fork(decode.batch())));
      }
      if (round % 23 == 22 && !live.empty() && !live.front()->InPrompt()) {
        live.front()->Check();
        live.front()->Finish(decode.batch());
        live.erase(live.begin());
      }
    }
    for (const auto& twin : live) {
      twin->Check();
      twin->Finish(twin->InPrompt() ? prompts.batch() : decode.batch());
    }
    live.clear();
    pair.ExpectSamePages();
    EXPECT_GT(pair.worker->counters().published_pages, 20u);
  }
}

TEST(DeviceWorkerTest, HitsComeLayerByLayerAndCountAsOnTheCpu) {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = Options();
    const SequenceModel model(options, RandomTokens(1500, 3));
    Pair pair(options, seed);
    pair.device.everything_pinned = true;
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun decode(pair.device, *pair.worker, {});
    for (const int prompt : {900, 1100, 1400}) {
      pair.device.HoldOthers();
      Twin twin(model, prompt, *pair.cpu, *pair.worker);
      EXPECT_EQ(twin.sequence().cached_tokens(), twin.expected().cached_tokens());
      EXPECT_EQ(twin.sequence().stats().hit_tokens_host, twin.expected().stats().hit_tokens_host);
      while (twin.InPrompt()) PassOf(prompts, {{&twin, twin.PromptEntry(512)}});
      for (int i = 0; i < 40; ++i) PassOf(decode, {{&twin, twin.Entry(1, 1)}});
      pair.device.LetGo();
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

// A worker pins in the background.
void AwaitPinned(const SimulatedDevice& device) {
  const TimePoint deadline = Clock::Real().Now() + kPatience;
  while (device.pinned_ranges() == 0) {
    ASSERT_LT(Clock::Real().Now(), deadline) << "nothing was pinned";
    std::this_thread::yield();
  }
}

// Pages that lie in pinned memory come by the kernel, others by copies, together and alone.
TEST(DeviceWorkerTest, HitsComeFromPinnedMemoryAndFromOther) {
  WorkerOptions options = Options();
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
        const auto worker = OpenDevice(options, &store, device, sizes);
        DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
        AwaitPinned(device);
        for (const int prompt : {900, 1400, 1300}) {
          Twin twin(model, prompt, *cpu, *worker);
          EXPECT_EQ(twin.sequence().cached_tokens(), twin.expected().cached_tokens());
          while (twin.InPrompt()) PassOf(prompts, {{&twin, twin.PromptEntry(512)}});
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

// What a thread could not enqueue behind Begin's back fails the pass that waits for it, and nobody
// else.
TEST(DeviceWorkerTest, LoadsThatCannotBeEnqueuedFail) {
  const WorkerOptions options = Options();
  const SequenceModel model(options, RandomTokens(1200, 3));
  Pair pair(options, 3);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  {
    Twin cold(model, 1000, *pair.cpu, *pair.worker);
    while (cold.InPrompt()) PassOf(prompts, {{&cold, cold.PromptEntry(512)}});
    cold.Finish(prompts.batch());
    pair.Settle();
  }
  pair.device.copies_fail_from = 5;
  {
    const auto hit = Begin(*pair.worker, model.prompt(1200));
    EXPECT_EQ(hit->cached_tokens(), 896);
    const auto& loads = static_cast<const ResidentSequence&>(*hit).loads;
    ASSERT_EQ(loads.size(), 1u);
    const OwnedStream stream = NewStream(pair.device).value();
    EXPECT_TRUE(absl::IsInternal(loads.front()->MakeWait(stream.get(), 0)));
    EXPECT_TRUE(absl::IsInternal(loads.front()->MakeWaitAll(stream.get())));
    EXPECT_EQ(loads.front()->Settle(), 0);
  }
  pair.device.copies_fail_from = SIZE_MAX;
  Twin again(model, 1200, *pair.cpu, *pair.worker);
  EXPECT_EQ(again.sequence().cached_tokens(), 896);
  while (again.InPrompt()) PassOf(prompts, {{&again, again.PromptEntry(512)}});
  again.Check();
}

// Two live sequences with equal prefixes on two streams: the second attends the first one's pages.
TEST(DeviceWorkerTest, LiveSequencesSharePages) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = Options();
    const SequenceModel model(options, RandomTokens(1200, 3));
    SimulatedDevice device(seed);
    const auto worker = OpenDevice(options, nullptr, device);
    const auto cpu = Worker::Open(options, nullptr).value();
    DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun others(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
    Twin first(model, 1200, *cpu, *worker);
    while (first.InPrompt()) PassOf(prompts, {{&first, first.PromptEntry(512)}});
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    Twin second(model, 1100, *cpu, *worker);
    EXPECT_EQ(second.sequence().cached_tokens(), 832);
    EXPECT_EQ(second.expected().cached_tokens(), 832);
    while (second.InPrompt()) {
      const RunEntry entry = second.PromptEntry(512);
      PassOf(others, {{&second, entry}});
    }
    first.Check();
    second.Check();
    EXPECT_EQ(worker->counters().hit_tokens_worker, 832u);
  }
}

// One prompt's rows serve one prompt after the other while the decode stream, which takes over what
// it needs of them, is far behind.
TEST(DeviceWorkerTest, RoomIsReusedBehindItsUsers) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = Options();
    DeviceWorkerOptions sizes = SmallDevice();
    sizes.prompts = 1;
    sizes.pages = 64;
    sizes.passes_in_flight = 64;
    sizes.evict_results = 64;
    Pair pair(options, seed, sizes);
    std::vector<SequenceModel> models;
    for (uint32_t i = 0; i < 5; ++i) models.emplace_back(options, RandomTokens(500, 40 + i));
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 400});
    DeviceRun decode(pair.device, *pair.worker, {});
    std::vector<std::unique_ptr<Twin>> twins;
    pair.device.HoldOthers();
    for (const SequenceModel& model : models) {
      twins.push_back(std::make_unique<Twin>(model, 400, *pair.cpu, *pair.worker));
      Twin& twin = *twins.back();
      while (twin.InPrompt()) PassOf(prompts, {{&twin, twin.PromptEntry(400)}});
      for (int i = 0; i < 3; ++i) PassOf(decode, {{&twin, twin.Entry(1, 1)}});
    }
    pair.device.LetGo();
    for (const auto& twin : twins) {
      twin->Check();
      twin->Finish(decode.batch());
    }
    twins.clear();
    pair.ExpectSamePages();
  }
}

TEST(DeviceWorkerTest, NoRoomChangesNothing) {
  const WorkerOptions options = Options();
  const SequenceModel model(options, RandomTokens(1200, 3));
  DeviceWorkerOptions sizes = SmallDevice();
  sizes.pages = 9;
  sizes.sequences = 2;
  sizes.prompts = 1;
  Pair pair(options, 2, sizes);
  DeviceRun prompts(pair.device, *pair.worker,
                    {.kind = PassKind::kPrompt, .sequences = 2, .tokens = 512});
  DeviceRun decode(pair.device, *pair.worker, {});
  const SequenceOptions kept{
      .extra = {}, .publish = Publish::kNone, .deadline = {}, .cached_tokens_max = {}};
  Twin twin(model, 700, *pair.cpu, *pair.worker, kept);
  Twin other(model, 1200, *pair.cpu, *pair.worker, kept);
  // Rows for one prompt only.
  EXPECT_TRUE(absl::IsResourceExhausted(
      prompts.TryPass({twin.PromptEntry(100), other.PromptEntry(100)}).status()));
  while (twin.InPrompt()) PassOf(prompts, {{&twin, twin.PromptEntry(512)}});
  EXPECT_TRUE(absl::IsResourceExhausted(prompts.TryPass({other.PromptEntry(512)}).status()));
  // 700 tokens have 6 history pages; its prompt's rows go with the first decode pass.
  PassOf(decode, {{&twin, twin.Entry(1, 1)}});
  PassOf(prompts, {{&other, other.PromptEntry(512)}});
  // The next block wants 7 pages where 3 are.
  const absl::Status full = prompts.TryPass({other.PromptEntry(512)}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_THAT(std::string(full.message()), testing::HasSubstr("pages in device memory"));
  for (int i = 0; i < 30; ++i) PassOf(decode, {{&twin, twin.Entry(1, 1)}});
  twin.Check();
  twin.Finish(decode.batch());
  ASSERT_TRUE(pair.worker->WaitPublished(kPatience).ok());
  while (other.length() < 1024) PassOf(prompts, {{&other, other.PromptEntry(512)}});
  other.Check();
}

TEST(DeviceWorkerTest, DamagedPagesEndThePrompt) {
  for (const int damaged : {0, 1, 5}) {
    SCOPED_TRACE(damaged);
    WorkerOptions options = Options();
    options.verify_every = 0;
    const SequenceModel model(options, RandomTokens(1200, 3));
    Pair pair(options, 3);
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    {
      auto first = Begin(*pair.worker, model.prompt(1000));
      while (first->length() < 1000) {
        const int tokens = first->pass_tokens_max();
        prompts.Pass({{first.get(), &model, first->length() + tokens, tokens}});
      }
      ASSERT_TRUE(prompts.batch().Finish(*first).ok());
      pair.Settle();
    }
    for (const auto& [key, bytes] : pair.device_store.contents()) {
      const auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes)));
      ASSERT_TRUE(header.ok()) << header.status();
      if (header->position == static_cast<uint32_t>(damaged) + 1) {
        ASSERT_TRUE(pair.device_store.Damage(key));
      }
    }
    const size_t stored = pair.device_store.pages();
    auto hit = Begin(*pair.worker, model.prompt(1200));
    EXPECT_EQ(hit->cached_tokens(), 896);
    absl::Status status;
    while (status.ok() && hit->length() < 1200) {
      const int tokens = hit->pass_tokens_max();
      status = prompts.TryPass({{hit.get(), &model, hit->length() + tokens, tokens}}).status();
      pair.Settle();  // what the first passes stored could be published now
    }
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("token " + std::to_string(64 * damaged)));
    EXPECT_TRUE(absl::IsFailedPrecondition(prompts.batch().Finish(*hit)));
    hit.reset();
    pair.Settle();
    EXPECT_EQ(pair.device_store.pages(), stored) << "pages computed over damaged ones were stored";
    EXPECT_EQ(pair.worker->counters().verify_failures, 1u);
    auto again = Begin(
        *pair.worker, model.prompt(1200),
        {.extra = {}, .publish = Publish::kAll, .deadline = {}, .cached_tokens_max = 64 * damaged});
    EXPECT_EQ(again->cached_tokens(), 64 * damaged);
    while (again->length() < 1200) {
      const int tokens = again->pass_tokens_max();
      prompts.Pass({{again.get(), &model, again->length() + tokens, tokens}});
    }
  }
}

// NaN in a window: nothing from its page on leaves the sequence.
TEST(DeviceWorkerTest, WindowsThatAreNotFiniteStayHere) {
  for (const int bad : {10, 200}) {
    SCOPED_TRACE(bad);
    const WorkerOptions options = Options();
    const SequenceModel model(options, RandomTokens(700, 3));
    Pair pair(options, 1);
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    prompts.poisoned_position = bad;
    auto sequence = Begin(*pair.worker, model.prompt(700));
    while (sequence->length() < 700) {
      const int tokens = sequence->pass_tokens_max();
      prompts.Pass({{sequence.get(), &model, sequence->length() + tokens, tokens}});
    }
    ASSERT_TRUE(prompts.batch().Finish(*sequence).ok());
    pair.Settle();
    EXPECT_EQ(pair.device_store.pages(), static_cast<size_t>(bad / 64));
    EXPECT_EQ(pair.worker->counters().windows_refused, 1u);
    EXPECT_EQ(Begin(*pair.worker, model.prompt(700))->cached_tokens(), bad / 64 * 64);
  }
}

// crumbd goes and comes: sequences go on, what could not be published is counted.
TEST(DeviceWorkerTest, GoesOnWithoutCrumbd) {
  const WorkerOptions options = Options();
  const SequenceModel model(options, RandomTokens(1200, 3));
  Pair pair(options, 5);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(pair.device, *pair.worker, {});
  Twin twin(model, 900, *pair.cpu, *pair.worker);
  PassOf(prompts, {{&twin, twin.PromptEntry(512)}});
  pair.Settle();
  pair.device_store.up = false;
  while (twin.InPrompt()) PassOf(prompts, {{&twin, twin.PromptEntry(512)}});
  for (int i = 0; i < 70; ++i) PassOf(decode, {{&twin, twin.Entry(1, 1)}});
  twin.Check();
  twin.Finish(decode.batch());
  pair.Settle();
  EXPECT_GT(pair.worker->counters().publish_dropped_unavailable, 5u);
  pair.device_store.up = true;
  Twin next(model, 900, *pair.cpu, *pair.worker);
  EXPECT_EQ(next.sequence().cached_tokens(), 64);  // what was published before
}

TEST(DeviceWorkerTest, LeavesNothingBehind) {
  const WorkerOptions options = Options();
  const SequenceModel model(options, RandomTokens(700, 3));
  Pair pair(options, 0);
  for (int i = 0; i < 200; ++i) {
    auto sequence = Begin(*pair.worker, model.prompt(600));
    if (i % 50 > 0) continue;
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    while (sequence->length() < 600) {
      const int tokens = sequence->pass_tokens_max();
      prompts.Pass({{sequence.get(), &model, sequence->length() + tokens, tokens}});
    }
    ASSERT_TRUE(prompts.batch().Finish(*sequence).ok());
    pair.Settle();
  }
  pair.Settle();
  EXPECT_EQ(pair.device_store.leases(), 0u);
  pair.worker.reset();
  EXPECT_EQ(pair.device.live_allocations(), 0u);
  EXPECT_EQ(pair.device.live_handles(), 0u);
}

TEST(DeviceWorkerTest, RefusesWhatItDoesNotServe) {
  SimulatedDevice device(0);
  const auto code = [&](const WorkerOptions& options, const DeviceWorkerOptions& sizes) {
    return DeviceWorker::Open(options, sizes, nullptr, device).status().code();
  };
  WorkerOptions drafts = Options();
  drafts.draft_slots = 8;
  EXPECT_EQ(code(drafts, SmallDevice()), absl::StatusCode::kInvalidArgument);
  DeviceWorkerOptions none = SmallDevice();
  none.prompts = 0;
  EXPECT_EQ(code(Options(), none), absl::StatusCode::kInvalidArgument);
  DeviceWorkerOptions negative = SmallDevice();
  negative.bf16_pages = -1;
  EXPECT_EQ(code(Options(), negative), absl::StatusCode::kInvalidArgument);
  SimulatedDevice small(0, 1 << 20);
  EXPECT_EQ(DeviceWorker::Open(Options(), SmallDevice(), nullptr, small).status().code(),
            absl::StatusCode::kResourceExhausted);

  const auto worker = OpenDevice(Options(), nullptr, device);
  EXPECT_EQ(worker->NewBatch({.tokens = 9}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(worker->NewBatch({.sequences = 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(worker->Begin({}).status().code(), absl::StatusCode::kInvalidArgument);

  const SequenceModel model(Options(), RandomTokens(700, 3));
  DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 100});
  DeviceRun decode(device, *worker, {});
  const auto sequence = Begin(*worker, model.prompt(600));
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

TEST(DeviceWorkerTest, RotationsWithMeansFeedbackAndShifts) {
  WorkerOptions options = Options();
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  RotationSet::Arrays arrays;
  arrays.layers = 2;
  arrays.kv_heads = 2;
  arrays.head_dim = 64;
  arrays.q_heads = 4;
  arrays.position_blocks = 3;
  arrays.pages_per_position_block = 2;
  const auto fill = [&](std::vector<float>& values, size_t count) {
    values.resize(count);
    for (float& value : values) value = normal(random);
  };
  fill(arrays.mean_k, 2 * 2 * 3 * 64);
  fill(arrays.mean_v, 2 * 2 * 64);
  fill(arrays.shift, 2 * 4);
  arrays.feedback_k.assign(2 * 2 * 64 * 64, 0.0f);
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int i = 0; i < 64; ++i) {
      for (int j = i + 1; j < 64; ++j) {
        arrays.feedback_k[(matrix * 64 + i) * 64 + j] = 0.1f * normal(random);
      }
    }
  }
  arrays.feedback_v = arrays.feedback_k;
  options.method = kernels::Method::kCrumb;
  options.rotations = RotationSet::Of("test", std::move(arrays)).value();
  const SequenceModel model(options, RandomTokens(900, 3));
  Pair pair(options, 4);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(pair.device, *pair.worker, {});
  Twin twin(model, 800, *pair.cpu, *pair.worker);
  while (twin.InPrompt()) PassOf(prompts, {{&twin, twin.PromptEntry(400)}});
  for (int i = 0; i < 70; ++i) PassOf(decode, {{&twin, twin.Entry(1, 1)}});
  twin.Check();
  twin.Finish(decode.batch());
  pair.ExpectSamePages();
}

// Moves new sequences of both workers to BF16 history, or back.
void SetState(Pair& pair, KeyspaceState state) {
  for (MemoryClient* store : {&pair.cpu_store, &pair.device_store}) {
    for (const KeyspaceId& keyspace : store->int2_keyspaces()) {
      ASSERT_TRUE(store->SetKeyspaceState(keyspace, state, "test", "test").ok());
    }
  }
}

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

// A keyspace is given up while sequences run: those go on with INT2, new ones in the same captured
// passes have BF16 history, and afterwards INT2 comes back.
TEST(DeviceWorkerTest, SequencesOfBothFormatsShareABatch) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    const WorkerOptions options = Options();
    Pair pair(options, seed);
    std::mt19937 random(seed);
    std::vector<SequenceModel> models;
    for (uint32_t i = 0; i < 6; ++i) models.emplace_back(options, RandomTokens(1200, 60 + i));
    DeviceRun prompts(pair.device, *pair.worker,
                      {.kind = PassKind::kPrompt, .sequences = 3, .tokens = 400});
    DeviceRun decode(pair.device, *pair.worker,
                     {.kind = PassKind::kDecode, .sequences = 6, .tokens = 3});
    decode.Capture(Simulated(pair.device));
    std::vector<std::unique_ptr<Twin>> live;
    const int lengths[] = {700, 330, 1100, 30, 600, 900};
    for (int round = 0; round < 72; ++round) {
      if (round == 18) SetState(pair, KeyspaceState::kBf16);
      if (round == 54) SetState(pair, KeyspaceState::kActive);
      if (round % 11 == 0 && live.size() < models.size()) {
        const size_t next = live.size();
        live.push_back(
            std::make_unique<Twin>(models[next], lengths[next], *pair.cpu, *pair.worker));
      }
      std::vector<std::pair<Twin*, RunEntry>> in_prompt, behind;
      for (const auto& twin : live) {
        if (twin->InPrompt() && in_prompt.size() < 3) {
          in_prompt.emplace_back(twin.get(), twin->PromptEntry(1 + random() % 400));
        } else if (!twin->InPrompt()) {
          behind.emplace_back(twin.get(), twin->Entry(3, random() % 4));
        }
      }
      if (!in_prompt.empty()) PassOf(prompts, in_prompt);
      if (!behind.empty()) PassOf(decode, behind);
    }
    int bf16 = 0;
    for (const auto& twin : live) {
      twin->Check();
      const SequenceStats ours = twin->sequence().stats(), theirs = twin->expected().stats();
      EXPECT_EQ(ours.held_bytes, theirs.held_bytes);
      EXPECT_EQ(ours.stored_bytes, theirs.stored_bytes);
      bf16 += ours.bits_per_element() == 16.0 && twin->length() > 400;
      twin->Finish(twin->InPrompt() ? prompts.batch() : decode.batch());
    }
    EXPECT_EQ(bf16, 2);
    pair.ExpectSamePages();
    EXPECT_GT(Bf16PagesOf(pair.device_store), 10);
    EXPECT_EQ(pair.worker->counters().windows_evicted, pair.cpu->counters().windows_evicted);
  }
}

// Behind the first, each hits what was published before it; rows fork with their pages.
TEST(DeviceWorkerTest, Bf16HistoryIsFetchedAndForked) {
  for (const int kernel_layers : {0, 1, 99}) {
    SCOPED_TRACE(kernel_layers);
    const WorkerOptions options = Options();
    const SequenceModel model(options, RandomTokens(1800, 9));
    DeviceWorkerOptions sizes = SmallDevice();
    sizes.load_kernel_layers = kernel_layers;
    Pair pair(options, 3 + kernel_layers % 2, sizes);
    pair.device.everything_pinned = true;
    SetState(pair, KeyspaceState::kBf16);
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun decode(pair.device, *pair.worker, {.sequences = 2});
    int cached = 0;
    for (const int prompt : {1000, 1300, 1700}) {
      pair.device.HoldOthers();
      Twin twin(model, prompt, *pair.cpu, *pair.worker);
      EXPECT_EQ(twin.sequence().cached_tokens(), twin.expected().cached_tokens());
      EXPECT_EQ(twin.sequence().cached_tokens() > 0, prompt > 1000);
      cached += twin.sequence().cached_tokens();
      while (twin.InPrompt()) PassOf(prompts, {{&twin, twin.PromptEntry(512)}});
      for (int i = 0; i < 10; ++i) PassOf(decode, {{&twin, twin.Entry(1, 1)}});
      Twin fork = twin.Fork(decode.batch());
      for (int i = 0; i < 70; ++i) {
        PassOf(decode, {{&twin, twin.Entry(1, 1)}, {&fork, fork.Entry(1, 1)}});
      }
      pair.device.LetGo();
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

TEST(DeviceWorkerTest, DamagedBf16PagesEndThePrompt) {
  WorkerOptions options = Options();
  options.verify_every = 0;
  const SequenceModel model(options, RandomTokens(1200, 3));
  Pair pair(options, 3);
  SetState(pair, KeyspaceState::kBf16);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  Twin first(model, 1000, *pair.cpu, *pair.worker);
  while (first.InPrompt()) PassOf(prompts, {{&first, first.PromptEntry(512)}});
  first.Finish(prompts.batch());
  pair.Settle();
  for (const auto& [key, bytes] : pair.device_store.contents()) {
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes)));
    ASSERT_TRUE(header.ok()) << header.status();
    if (header->position == 4) {
      ASSERT_TRUE(pair.device_store.Damage(key));
    }
  }
  const auto hit = Begin(*pair.worker, model.prompt(1200));
  EXPECT_EQ(hit->cached_tokens(), 896);
  absl::Status status;
  while (status.ok() && hit->length() < 1200) {
    const int tokens = hit->pass_tokens_max();
    status = prompts.TryPass({{hit.get(), &model, hit->length() + tokens, tokens}}).status();
  }
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("token 192"));
}

// BF16 pages take memory when they are wanted, not before; where there is none, sequences say so.
TEST(DeviceWorkerTest, Bf16PagesNeedMemoryWhenTheyAreUsed) {
  const WorkerOptions options = Options();
  const SequenceModel model(options, RandomTokens(1200, 3));
  DeviceWorkerOptions sizes = SmallDevice();
  sizes.bf16_pages = 6;
  Pair pair(options, 1, sizes);
  const size_t before = pair.device.live_allocations();
  Begin(*pair.worker, model.prompt(700));
  EXPECT_EQ(pair.device.live_allocations(), before);
  SetState(pair, KeyspaceState::kBf16);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  const size_t with_run = pair.device.live_allocations();
  {
    Twin twin(model, 1200, *pair.cpu, *pair.worker);
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
    const auto worker = OpenDevice(options, &store, device, sizes);
    for (const KeyspaceId& keyspace : store.int2_keyspaces()) {
      ASSERT_TRUE(store.SetKeyspaceState(keyspace, KeyspaceState::kBf16, "", "").ok());
    }
    const absl::Status none = worker->Begin(model.prompt(700)).status();
    EXPECT_TRUE(absl::IsResourceExhausted(none)) << none;
    EXPECT_THAT(std::string(none.message()), testing::HasSubstr("bf16_pages"));
  }
}

// A worker that stores BF16 by its options.
TEST(DeviceWorkerTest, Bf16WorkersAreAsOnTheCpu) {
  WorkerOptions options = Options();
  options.history_format = kernels::PageFormat::kBf16;
  const SequenceModel model(options, RandomTokens(900, 3));
  Pair pair(options, 2);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(pair.device, *pair.worker, {});
  Twin twin(model, 700, *pair.cpu, *pair.worker);
  while (twin.InPrompt()) PassOf(prompts, {{&twin, twin.PromptEntry(300)}});
  for (int i = 0; i < 130; ++i) PassOf(decode, {{&twin, twin.Entry(1, 1)}});
  twin.Check();
  twin.Finish(decode.batch());
  pair.ExpectSamePages();
}

// Random constants, with means, so that decode passes make offsets.
WorkerOptions CentredOptions() {
  WorkerOptions options = Options();
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  RotationSet::Arrays arrays;
  arrays.layers = 2;
  arrays.kv_heads = 2;
  arrays.head_dim = 64;
  arrays.q_heads = 4;
  arrays.position_blocks = 3;
  arrays.pages_per_position_block = 2;
  arrays.mean_k.resize(2 * 2 * 3 * 64);
  arrays.mean_v.resize(2 * 2 * 64);
  for (auto* values : {&arrays.mean_k, &arrays.mean_v}) {
    for (float& value : *values) value = normal(random);
  }
  options.rotations = RotationSet::Of("centred", std::move(arrays)).value();
  return options;
}

// What the window of page `page` measures on the CPU with the queries of tokens [begin, end).
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

// Windows of a prompt are measured with the queries of the pass behind which they leave: at the end
// of each block, and of the prompt, where the CPU worker does the same.
TEST(DeviceWorkerTest, WindowsOfPromptsAreMeasured) {
  WorkerOptions options = Options();
  options.watch_every = 1;
  const SequenceModel model(options, RandomTokens(1300, 3));
  Pair pair(options, 5);
  DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 300});
  DeviceRun decode(pair.device, *pair.worker, {});
  Twin twin(model, 1290, *pair.cpu, *pair.worker);
  std::vector<QualitySample> expected;
  const auto settle = [&](int page, int head, int begin, int end) {
    pair.Settle();
    const auto more = Measured(options, model, pair.device_store, page, head, begin, end);
    expected.insert(expected.end(), more.begin(), more.end());
    ExpectSamples(pair.device_store.quality(), expected);
  };
  while (twin.length() < 512) PassOf(prompts, {{&twin, twin.PromptEntry(300)}});
  pair.Settle();
  EXPECT_TRUE(pair.device_store.quality().empty());  // the windows have not left yet
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

TEST(DeviceWorkerTest, WindowsAtAPromptsEndAreMeasuredAsOnTheCpu) {
  for (const bool centred : {false, true}) {
    SCOPED_TRACE(centred);
    WorkerOptions options = centred ? CentredOptions() : Options();
    options.watch_every = 1;
    const SequenceModel model(options, RandomTokens(800, 3));
    Pair pair(options, 6);
    DeviceRun prompts(pair.device, *pair.worker,
                      {.kind = PassKind::kPrompt, .sequences = 2, .tokens = 500});
    DeviceRun decode(pair.device, *pair.worker, {.sequences = 2});
    decode.Capture(Simulated(pair.device));
    Twin other(model, 200, *pair.cpu, *pair.worker);
    Twin twin(model, 450, *pair.cpu, *pair.worker);
    PassOf(prompts, {{&other, other.PromptEntry(500)}, {&twin, twin.PromptEntry(500)}});
    PassOf(decode, {{&other, other.Entry(1, 1)}, {&twin, twin.Entry(1, 1)}});
    pair.Settle();
    std::vector<QualitySample> theirs = pair.cpu_store.quality();
    ASSERT_GE(theirs.size(), 2u);
    theirs.resize(2);  // of all windows of the prompt one is measured here
    ExpectSamples(pair.device_store.quality(), theirs);
    twin.Check();
    other.Check();
  }
}

// In passes that are captured the kernel that makes the offsets holds the queries, where there is
// one.
TEST(DeviceWorkerTest, WindowsOfDecodePassesAreMeasured) {
  for (const int tokens : {1, 3, 7}) {
    SCOPED_TRACE(tokens);
    WorkerOptions options = CentredOptions();
    options.watch_every = 1;
    const SequenceModel model(options, RandomTokens(900, 3)), idle(options, RandomTokens(900, 4));
    Pair pair(options, 7 + tokens);
    DeviceRun prompts(pair.device, *pair.worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun decode(pair.device, *pair.worker, {.sequences = 3, .tokens = tokens});
    decode.Capture(Simulated(pair.device));
    Twin first(idle, 20, *pair.cpu, *pair.worker);
    Twin twin(model, 300, *pair.cpu, *pair.worker);
    for (Twin* one : {&first, &twin}) {
      while (one->InPrompt()) PassOf(prompts, {{one, one->PromptEntry(512)}});
    }
    std::vector<QualitySample> expected;
    int pages = 1;  // with the sink
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

// Hits nothing.
const SequenceOptions kCold{
    .extra = {}, .publish = Publish::kAll, .deadline = {}, .cached_tokens_max = 0};

// Windows that cannot be judged are not, and those that are given up leave room for others.
TEST(DeviceWorkerTest, TheWatchIsBoundedAndLetsGo) {
  WorkerOptions options = CentredOptions();
  options.watch_every = 1;
  const SequenceModel model(options, RandomTokens(900, 3));
  SimulatedDevice device(3);
  MemoryClient store;
  {
    const auto worker = OpenDevice(options, &store, device);
    DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .sequences = 4, .tokens = 512});
    DeviceRun decode(device, *worker, {.sequences = 4});
    for (int round = 0; round < 5; ++round) {
      // Queries are held for a sequence that is dropped before its windows leave.
      const auto dropped = Begin(*worker, model.prompt(500), kCold);
      prompts.Pass({{dropped.get(), &model, 500, 500}});
    }
    EXPECT_EQ(worker->counters().windows_measured, 0u);
    auto given_up = Begin(*worker, model.prompt(500), kCold);
    prompts.Pass({{given_up.get(), &model, 500, 0}});
    given_up.reset();
    prompts.poisoned_position = 70;  // in the head whose turn it is
    const auto bad = Begin(*worker, model.prompt(450), kCold);
    prompts.Pass({{bad.get(), &model, 450, 450}});
    decode.Pass({{bad.get(), &model, 451, 1}});
    prompts.poisoned_position = -1;
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    EXPECT_EQ(worker->counters().windows_refused, 1u);
    EXPECT_EQ(worker->counters().windows_measured, 0u);
    // More at once than there are samples.
    std::vector<std::unique_ptr<DeviceSequence>> sequences;
    std::vector<RunEntry> entries, next;
    for (int i = 0; i < 4; ++i) {
      sequences.push_back(Begin(*worker, model.prompt(450 + i), kCold));
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

// The watch gives INT2 up; new sequences store BF16 on the device, until a command brings INT2
// back.
TEST(DeviceWorkerTest, TheWatchGivesInt2Up) {
  WorkerOptions options = Options();
  options.watch_every = 1;
  options.watch_windows = 4;
  options.watch_error_max = 0.01f;  // 2 bits are never that good
  const SequenceModel model(options, RandomTokens(1300, 3));
  SimulatedDevice device(1);
  MemoryClient store;
  const auto worker = OpenDevice(options, &store, device);
  DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(device, *worker, {});
  const auto bits = [&](int prompt) {
    const auto sequence = Begin(*worker, model.prompt(prompt), kCold);
    while (sequence->length() < prompt) {
      const int tokens = sequence->pass_tokens_max();
      prompts.Pass({{sequence.get(), &model, sequence->length() + tokens, tokens}});
    }
    decode.Pass({{sequence.get(), &model, prompt + 1, 1}});
    const double answer = sequence->stats().bits_per_element();
    EXPECT_TRUE(decode.batch().Finish(*sequence).ok());
    EXPECT_TRUE(worker->WaitPublished(kPatience).ok());
    return answer;
  };
  // One window of each block, and at the prompts' ends.
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
  EXPECT_EQ(worker->counters().windows_measured, 4u);  // nothing to measure
  ASSERT_TRUE(store.SetKeyspaceState(int2, KeyspaceState::kActive, "operator", "").ok());
  EXPECT_LT(bits(1270), 16.0);
}

}  // namespace
}  // namespace crumb::client
