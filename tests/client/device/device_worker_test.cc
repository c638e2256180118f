// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The device back end on a simulated device against the CPU back end: the same tokens give the same
// outputs and the same published pages.
#include <algorithm>
#include <cmath>
#include <map>

#include "crumb/device_worker.h"
#include "crumb/worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
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

TEST(DeviceWorkerTest, OneSequenceIsAsOnTheCpu) {
  for (uint32_t seed = 0; seed < 6; ++seed) {
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
    EXPECT_EQ(device_store.contents(), cpu_store.contents());
  }
}

}  // namespace
}  // namespace crumb::client
