// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares the GPU back end on a GPU with the CPU back end; tests/gpu.sh runs it.
#include <cuda_runtime_api.h>

#include <cstring>
#include <numeric>
#include <random>

#include "crumb/device_worker.h"
#include "crumb/worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/counting_device.h"
#include "tests/client/gpu/device_run.h"
#include "tests/client/gpu/process_use.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

constexpr Duration kPatience = std::chrono::seconds(60);

WorkerOptions Options() {
  WorkerOptions options = SmallWorkerOptions();
  options.q_heads = 8;
  options.head_dim = 128;
  options.group_size = 128;
  options.draft_slots = 7;
  options.watch_every = 0;
  options.rotations = RotationSet::Hadamard(128).value();
  return options;
}

DeviceWorkerOptions SmallDevice() {
  DeviceWorkerOptions options;
  options.pages = 256;
  options.sequences = 8;
  options.prompts = 4;
  options.load_pages = 64;
  return options;
}

// Checks that the keys are equal and that few bytes of the tiles differ, because the GPU rounds
// differently.
void ExpectAlike(const MemoryClient& got, const MemoryClient& expected) {
  const auto ours = got.contents(), theirs = expected.contents();
  ASSERT_EQ(ours.size(), theirs.size());
  size_t bytes = 0, differ = 0;
  for (const auto& [key, page] : ours) {
    const auto found = theirs.find(key);
    ASSERT_NE(found, theirs.end());
    ASSERT_EQ(found->second.size(), page.size());
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(page)));
    ASSERT_TRUE(header.ok()) << header.status();
    const size_t tiles = FragmentHeaderBytes(header->range.tiles());
    bytes += page.size() - tiles;
    for (size_t i = tiles; i < page.size(); ++i) differ += page[i] != found->second[i];
  }
  EXPECT_LT(static_cast<double>(differ), 1e-3 * static_cast<double>(bytes));
}

Capturing CudaGraphs() {
  return {.begin =
              [](DeviceStream stream) {
                EXPECT_EQ(cudaStreamBeginCapture(reinterpret_cast<cudaStream_t>(stream),
                                                 cudaStreamCaptureModeThreadLocal),
                          cudaSuccess);
              },
          .end = [](DeviceStream handle) -> std::function<void()> {
            const auto stream = reinterpret_cast<cudaStream_t>(handle);
            cudaGraph_t graph = nullptr;
            cudaGraphExec_t executable = nullptr;
            EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
            EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
            cudaGraphDestroy(graph);
            const std::shared_ptr<void> owner(executable, [](void* held) {
              cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(held));
            });
            return [owner, executable, stream] {
              EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
            };
          }};
}

class CudaDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    auto device = OpenCudaDevice(0);
    if (absl::IsUnavailable(device.status()))
      GTEST_SKIP() << "needs a CUDA device: " << device.status();
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }
  std::unique_ptr<DeviceWorker> OpenWorker(const WorkerOptions& options, Client* client) {
    auto worker = DeviceWorker::Open(options, SmallDevice(), client, *device_);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return std::move(worker).value();
  }
  // Reads the prompt up to `end` on both back ends and returns the largest error of a pass.
  double Prompt(DeviceRun& run, const SequenceModel& model, DeviceSequence& sequence,
                Sequence& expected, int end, int chunk) {
    double worst = 0.0;
    while (sequence.length() < end) {
      const int tokens = std::min({chunk, sequence.pass_tokens_max(), end - sequence.length()});
      const int to = sequence.length() + tokens;
      const auto pass = run.Pass({{&sequence, &model, to, tokens}});
      worst = std::max(worst, RelativeError(pass->Outputs(0), model.Pass(expected, to)));
    }
    return worst;
  }

  OpenDevice device_;
};

TEST_F(CudaDeviceTest, CopiesComeInStreamOrder) {
  const OwnedStream stream = NewStream(*device_).value();
  const OwnedEvent event = NewEvent(*device_).value();
  const DeviceBuffer memory = NewDeviceBuffer(*device_, 4096).value();
  const PinnedBuffer host = NewPinnedBuffer(*device_, 8192).value();
  auto* bytes = reinterpret_cast<uint8_t*>(host.get());
  std::iota(bytes, bytes + 4096, 0);
  const auto at = reinterpret_cast<uint64_t>(bytes);
  const DeviceCopy to[] = {{memory.get(), at, 1000}, {memory.get() + 1000, at + 1000, 3096}};
  ASSERT_TRUE(device_->ToDevice(to, stream.get()).ok());
  // Copies 4 rows of 100 bytes, 200 apart, to 2000 bytes behind them.
  const DeviceRowsCopy rows{memory.get() + 2000, 200, memory.get(), 200, 100, 4};
  ASSERT_TRUE(device_->CopyRows(rows, stream.get()).ok());
  ASSERT_TRUE(device_->Clear(memory.get(), 100, stream.get()).ok());
  const DeviceCopy back[] = {{at + 4096, memory.get(), 2048},
                             {at + 6144, memory.get() + 2048, 2048}};
  ASSERT_TRUE(device_->ToHost(back, stream.get()).ok());
  ASSERT_TRUE(device_->Record(event.get(), stream.get()).ok());
  ASSERT_TRUE(device_->Synchronize(event.get()).ok());
  EXPECT_TRUE(device_->Done(event.get()).value());
  std::vector<uint8_t> expected(bytes, bytes + 4096);
  for (int row = 0; row < 4; ++row)
    std::memcpy(&expected[2000 + row * 200], bytes + row * 200, 100);
  std::memset(expected.data(), 0, 100);
  EXPECT_EQ(std::memcmp(expected.data(), bytes + 4096, 4096), 0);
}

TEST_F(CudaDeviceTest, PinnedArenaIsCopiedFrom) {
  std::vector<std::byte> memory(3 << 20);
  auto* begin = reinterpret_cast<std::byte*>((reinterpret_cast<uint64_t>(memory.data()) + 4095) /
                                             4096 * 4096);
  const std::span<const std::byte> pages(begin, 2 << 20);
  ASSERT_TRUE(device_->Pin(pages, PinAccess::kReadWrite).ok());
  EXPECT_FALSE(device_->Pin(pages, PinAccess::kReadWrite).ok());
  device_->Unpin(pages);
  ASSERT_TRUE(device_->Pin(pages, PinAccess::kReadWrite).ok());
  device_->Unpin(pages);
}

TEST_F(CudaDeviceTest, OneSequenceIsAsOnTheCpu) {
  const WorkerOptions options = Options();
  const SequenceModel model(options, RandomTokens(900, 7));
  MemoryClient cpu_store, device_store;
  const auto cpu = Worker::Open(options, &cpu_store).value();
  const auto worker = OpenWorker(options, &device_store);
  DeviceRun prompts(*device_, *worker, {.kind = PassKind::kPrompt, .tokens = 177});
  DeviceRun decode(*device_, *worker, {});
  auto expected = cpu->Begin(model.prompt(600)).value();
  auto sequence = worker->Begin(model.prompt(600)).value();
  EXPECT_LT(Prompt(prompts, model, *sequence, *expected, 600, 177), 5e-3);
  double worst = 0.0, sum = 0.0;
  for (int end = 601; end <= 900; ++end) {
    const auto pass = decode.Pass({{sequence.get(), &model, end, 1}});
    const double error = RelativeError(pass->Outputs(0), model.Pass(*expected, end));
    worst = std::max(worst, error);
    sum += error;
  }
  EXPECT_LT(worst, 1e-2);
  EXPECT_LT(sum / 300, 4e-3);
  ASSERT_TRUE(expected->Finish().ok());
  ASSERT_TRUE(decode.batch().Finish(*sequence).ok());
  ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
  ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
  EXPECT_EQ(worker->counters().windows_evicted, cpu->counters().windows_evicted);
  ExpectAlike(device_store, cpu_store);
}

// One graph serves every pass of a batch whose sequences join, grow and drop drafts. Prompts and
// decode passes run on different streams.
TEST_F(CudaDeviceTest, GraphServesSequencesThatJoin) {
  const WorkerOptions options = Options();
  std::vector<SequenceModel> models;
  for (uint32_t i = 0; i < 4; ++i) models.emplace_back(options, RandomTokens(1000, 30 + i));
  const auto cpu = Worker::Open(options, nullptr).value();
  const auto worker = OpenWorker(options, nullptr);
  DeviceRun prompts(*device_, *worker, {.kind = PassKind::kPrompt, .tokens = 400});
  DeviceRun decode(*device_, *worker, {.sequences = 4, .tokens = 3});
  decode.Capture(CudaGraphs());
  std::vector<std::unique_ptr<DeviceSequence>> sequences;
  std::vector<std::unique_ptr<Sequence>> expected;
  const int lengths[] = {30, 700, 330, 520};
  for (int round = 0; round < 120; ++round) {
    if (round % 10 == 0 && sequences.size() < models.size()) {
      const size_t next = sequences.size();
      sequences.push_back(worker->Begin(models[next].prompt(lengths[next])).value());
      expected.push_back(cpu->Begin(models[next].prompt(lengths[next])).value());
      EXPECT_LT(
          Prompt(prompts, models[next], *sequences[next], *expected[next], lengths[next], 400),
          5e-3);
    }
    std::vector<RunEntry> entries;
    for (size_t i = 0; i < sequences.size(); ++i) {
      entries.push_back({sequences[i].get(), &models[i], sequences[i]->length() + 3,
                         1 + static_cast<int>((round + i) % 3)});
    }
    const auto pass = decode.Pass(entries);
    for (size_t i = 0; i < entries.size(); ++i) {
      ASSERT_LT(RelativeError(pass->Outputs(i),
                              models[i].Pass(*expected[i], entries[i].end, entries[i].accepted)),
                5e-3)
          << "round " << round << " sequence " << i;
    }
  }
}

TEST_F(CudaDeviceTest, HitsOfTheCpusPagesAreVerified) {
  WorkerOptions options = Options();
  options.verify_every = 0;
  const SequenceModel model(options, RandomTokens(1400, 3));
  MemoryClient store;
  const auto cpu = Worker::Open(options, &store).value();
  {
    const auto cold = cpu->Begin(model.prompt(1100)).value();
    model.Pass(*cold, 1100);
    ASSERT_TRUE(cold->Finish().ok());
    ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
  }
  const auto worker = OpenWorker(options, &store);
  DeviceRun prompts(*device_, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
  {
    const auto expected = cpu->Begin(model.prompt(1400)).value();
    const auto hit = worker->Begin(model.prompt(1400)).value();
    EXPECT_EQ(hit->cached_tokens(), 1088);
    EXPECT_LT(Prompt(prompts, model, *hit, *expected, 1400, 512), 5e-3);
    EXPECT_EQ(worker->counters().verify_failures, 0u);
  }
  ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
  for (const auto& [key, bytes] : store.contents()) {
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes)));
    if (header.ok() && header->position == 6) {
      ASSERT_TRUE(store.Damage(key));
    }
  }
  const auto hit = worker->Begin(model.prompt(1400)).value();
  absl::Status status;
  while (status.ok() && hit->length() < 1400) {
    const int tokens = std::min(512, hit->pass_tokens_max());
    status = prompts.TryPass({{hit.get(), &model, hit->length() + tokens, tokens}}).status();
  }
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("token 320"));
}

TEST_F(CudaDeviceTest, AFlippedBitIsFoundWhereItLies) {
  const WorkerOptions options = Options();
  const SequenceModel model(options, RandomTokens(1200, 8));
  DeviceWorkerOptions sizes = SmallDevice();
  sizes.scrub_pages_per_second = 500;
  const auto worker = DeviceWorker::Open(options, sizes, nullptr, *device_).value();
  DeviceRun prompts(*device_, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(*device_, *worker, {});
  for (const int damaged : {0, 5}) {
    const uint64_t before = worker->counters().verify_failures;
    const auto sequence = worker->Begin(model.prompt(1000)).value();
    while (sequence->length() < 1000) {
      const int tokens = std::min(512, sequence->pass_tokens_max());
      prompts.Pass({{sequence.get(), &model, sequence->length() + tokens, tokens}});
    }
    decode.Pass({{sequence.get(), &model, 1001, 1}});
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    // Two laps over undamaged pages.
    const uint64_t scrubbed = worker->counters().pages_scrubbed;
    ASSERT_TRUE(Eventually([&] { return worker->counters().pages_scrubbed > scrubbed + 40; }));
    EXPECT_EQ(worker->counters().verify_failures, before);
    ASSERT_EQ(FlipBit(*device_, *sequence, damaged), "ok");
    ASSERT_TRUE(Eventually([&] { return worker->counters().verify_failures == before + 1; }));
    const auto pass = decode.TryPass({{sequence.get(), &model, 1002, 1}});
    EXPECT_TRUE(absl::IsDataLoss(pass.status())) << pass.status();
    EXPECT_THAT(std::string(pass.status().message()),
                testing::HasSubstr("token " + std::to_string(64 * damaged)));
  }
}

// Counts resources before and after rounds of opening, prefilling, decoding, publishing, hitting
// and closing. device_pools_suite.cc does the same with device pools and processes that die.
TEST_F(CudaDeviceTest, NothingIsLeftOfWorkersThatOpenAndClose) {
  const auto device =
      std::make_shared<CountingDevice>(std::shared_ptr<Device>(device_.get(), [](Device*) {}));
  const auto round = [&] {
    const WorkerOptions options = Options();
    const SequenceModel model(options, RandomTokens(1400, 3));
    MemoryClient store;
    const auto worker = DeviceWorker::Open(options, SmallDevice(), &store, *device).value();
    DeviceRun prompts(*device, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
    DeviceRun decode(*device, *worker, {});
    decode.Capture(CudaGraphs());
    for (const int cached : {0, 832}) {
      const auto sequence = worker->Begin(model.prompt(1100)).value();
      EXPECT_EQ(sequence->cached_tokens(), cached);
      while (sequence->length() < 1100) {
        const int tokens = std::min(512, sequence->pass_tokens_max());
        prompts.Pass({{sequence.get(), &model, sequence->length() + tokens, tokens}});
      }
      for (int i = 1; i <= 70; ++i) decode.Pass({{sequence.get(), &model, 1100 + i, 1}});
      ASSERT_TRUE(decode.batch().Finish(*sequence).ok());
      ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    }
  };
  const auto free_bytes = [] {
    size_t free = 0, total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return free;
  };
  // Modules, threads' stacks and the driver's own memory exist after two rounds.
  for (int i = 0; i < 2; ++i) round();
  const ProcessUse before = UseOfThisProcess();
  const size_t free_before = free_bytes();
  EXPECT_EQ(device->live(), CountingDevice::Live()) << device->live().ToString();
  for (int i = 0; i < 4; ++i) round();
  EXPECT_EQ(device->live(), CountingDevice::Live()) << device->live().ToString();
  const ProcessUse after = UseOfThisProcess();
  EXPECT_LE(after.fds, before.fds);
  EXPECT_EQ(after.mappings, before.mappings);
  EXPECT_EQ(after.locked_kb, before.locked_kb);
  EXPECT_EQ(after.pinned_kb, before.pinned_kb);
  EXPECT_LT(after.mapped_kb, before.mapped_kb + (uint64_t{1} << 20));
  // Another process may use the device meanwhile and release its memory.
  EXPECT_TRUE(Eventually([&] { return free_bytes() >= free_before; }))
      << "of device memory " << free_before << " bytes were free, " << free_bytes() << " are now";
}

// INT2 is given up while sequences run: new sequences have BF16 history, run in the same captured
// passes as the others, publish BF16 pages, and hit them.
TEST_F(CudaDeviceTest, Bf16HistoryJoinsInt2InOneGraph) {
  const WorkerOptions options = Options();
  std::vector<SequenceModel> models;
  for (uint32_t i = 0; i < 4; ++i) models.emplace_back(options, RandomTokens(1600, 50 + i));
  MemoryClient cpu_store, device_store;
  const auto cpu = Worker::Open(options, &cpu_store).value();
  const auto worker = OpenWorker(options, &device_store);
  DeviceRun prompts(*device_, *worker, {.kind = PassKind::kPrompt, .tokens = 400});
  DeviceRun decode(*device_, *worker, {.sequences = 4, .tokens = 3});
  decode.Capture(CudaGraphs());
  std::vector<std::unique_ptr<DeviceSequence>> sequences;
  std::vector<std::unique_ptr<Sequence>> expected;
  const int lengths[] = {700, 1300, 600, 900};
  for (int round = 0; round < 100; ++round) {
    if (round % 20 == 0 && sequences.size() < models.size()) {
      const size_t next = sequences.size();
      sequences.push_back(worker->Begin(models[next].prompt(lengths[next])).value());
      expected.push_back(cpu->Begin(models[next].prompt(lengths[next])).value());
      EXPECT_LT(
          Prompt(prompts, models[next], *sequences[next], *expected[next], lengths[next], 400),
          5e-3);
      for (MemoryClient* store : {&cpu_store, &device_store}) {
        for (const KeyspaceId& keyspace : store->int2_keyspaces()) {
          ASSERT_TRUE(store->SetKeyspaceState(keyspace, KeyspaceState::kBf16, "", "").ok());
        }
      }
    }
    std::vector<RunEntry> entries;
    for (size_t i = 0; i < sequences.size(); ++i) {
      entries.push_back({sequences[i].get(), &models[i], sequences[i]->length() + 3,
                         1 + static_cast<int>((round + i) % 3)});
    }
    const auto pass = decode.Pass(entries);
    for (size_t i = 0; i < entries.size(); ++i) {
      const double bound = i == 0 ? 5e-3 : 5e-4;  // BF16 history differs only by the order of sums
      ASSERT_LT(RelativeError(pass->Outputs(i),
                              models[i].Pass(*expected[i], entries[i].end, entries[i].accepted)),
                bound)
          << "round " << round << " sequence " << i;
    }
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    ASSERT_TRUE(expected[i]->Finish().ok());
    ASSERT_TRUE(decode.batch().Finish(*sequences[i]).ok());
  }
  ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
  ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
  EXPECT_EQ(worker->counters().windows_evicted, cpu->counters().windows_evicted);
  ExpectAlike(device_store, cpu_store);
  auto warm = worker->Begin(models[1].prompt(1500)).value();
  auto warm_cpu = cpu->Begin(models[1].prompt(1500)).value();
  EXPECT_EQ(warm->cached_tokens(), 1216);
  EXPECT_LT(Prompt(prompts, models[1], *warm, *warm_cpu, 1500, 400), 5e-4);
  EXPECT_EQ(worker->counters().verify_failures, 0u);
}

// The quality watch measures the same on the GPU as on the CPU: the same window and queries at a
// prompt's end, and windows of the same kind in captured passes.
TEST_F(CudaDeviceTest, TheWatchMeasuresWindows) {
  WorkerOptions options = Options();
  options.watch_every = 1;
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  RotationSet::Arrays arrays;
  arrays.layers = options.layers;
  arrays.kv_heads = options.kv_heads;
  arrays.head_dim = options.head_dim;
  arrays.q_heads = options.q_heads;
  arrays.mean_k.resize(size_t{1} * options.layers * options.kv_heads * options.head_dim);
  for (float& value : arrays.mean_k) value = normal(random);
  options.rotations = RotationSet::Of("centred", std::move(arrays)).value();
  const SequenceModel model(options, RandomTokens(900, 7));
  MemoryClient cpu_store, device_store;
  const auto cpu = Worker::Open(options, &cpu_store).value();
  const auto worker = OpenWorker(options, &device_store);
  DeviceRun prompts(*device_, *worker, {.kind = PassKind::kPrompt, .tokens = 512});
  DeviceRun decode(*device_, *worker, {.sequences = 2, .tokens = 2});
  decode.Capture(CudaGraphs());
  auto expected = cpu->Begin(model.prompt(450)).value();
  const auto sequence = worker->Begin(model.prompt(450)).value();
  EXPECT_LT(Prompt(prompts, model, *sequence, *expected, 450, 512), 5e-3);
  double mean_error = 0.0;
  for (int end = 452; end <= 900; end += 2) {
    decode.Pass({{sequence.get(), &model, end, 2}});
    model.Pass(*expected, end);
    if (end == 452) {
      ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
      const auto ours = device_store.quality(), theirs = cpu_store.quality();
      ASSERT_EQ(ours.size(), static_cast<size_t>(options.layers));
      ASSERT_GE(theirs.size(), ours.size());
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_EQ(ours[i].layer, theirs[i].layer);
        EXPECT_NEAR(ours[i].attention_error, theirs[i].attention_error,
                    0.03 * theirs[i].attention_error);
        EXPECT_NEAR(ours[i].key_error, theirs[i].key_error, 0.03 * theirs[i].key_error);
        EXPECT_NEAR(ours[i].value_error, theirs[i].value_error, 0.03 * theirs[i].value_error);
        mean_error += theirs[i].attention_error / options.layers;
      }
    }
  }
  ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
  EXPECT_GT(worker->counters().windows_measured, 5u);
  for (const QualitySample& sample : device_store.quality()) {
    EXPECT_GT(sample.attention_error, 0.3 * mean_error);
    EXPECT_LT(sample.attention_error, 3.0 * mean_error);
  }
}

}  // namespace
}  // namespace crumb::client
