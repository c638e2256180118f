// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Runs many sequences of one worker on many threads, over a Client in memory, for sanitizers that
// cannot instrument gRPC.

#include <atomic>
#include <thread>
#include <vector>

#include "crumb/worker.h"
#include "gtest/gtest.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

using std::chrono::seconds;

TEST(WorkerThreadsTest, SequencesOnManyThreadsShareAndPublish) {
  const WorkerOptions options = SmallWorkerOptions();
  // Four prompts that two threads each read repeatedly, with outputs known from one thread.
  std::vector<SequenceModel> models;
  std::vector<std::vector<float>> expected;
  for (uint32_t i = 0; i < 4; ++i) {
    models.emplace_back(options, RandomTokens(460, 300 + i));
    const auto alone = Worker::Open(options, nullptr).value();
    const auto sequence = alone->Begin(models[i].prompt(450)).value();
    models[i].Pass(*sequence, 450);
    expected.push_back(models[i].Pass(*sequence, 451));
  }
  MemoryClient client;
  {
    const auto worker = Worker::Open(options, &client).value();
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        const SequenceModel& model = models[t % 4];
        for (int round = 0; round < 6; ++round) {
          const auto sequence = worker->Begin(model.prompt(450)).value();
          model.Pass(*sequence, 450);
          auto fork = sequence->Fork().value();
          wrong += model.Pass(*sequence, 451) != expected[t % 4];
          wrong += model.Pass(*fork, 451) != expected[t % 4];
          wrong += !sequence->Finish().ok();
        }
      });
    }
    for (int flips = 0; flips < 40; ++flips) {
      client.up = flips % 4 != 3;
      std::this_thread::yield();
    }
    client.up = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(worker->WaitPublished(seconds(20)).ok());
    const WorkerCounters counters = worker->counters();
    EXPECT_EQ(counters.sequences, 48);
    EXPECT_EQ(counters.published_pages, client.pages());
  }
  EXPECT_EQ(client.leases(), 0);
}

TEST(WorkerThreadsTest, ClosingAWorkerDropsWhatWaits) {
  WorkerOptions options = SmallWorkerOptions();
  options.publish_batch = 1;
  const SequenceModel model(options, RandomTokens(700, 400));
  for (int round = 0; round < 20; ++round) {
    MemoryClient client;
    const auto worker = Worker::Open(options, &client).value();
    const auto sequence = worker->Begin(model.prompt(640)).value();
    model.Pass(*sequence, 640);
    ASSERT_TRUE(sequence->Finish().ok());
  }
}

TEST(WorkerThreadsTest, WaitPublishedEndsInTime) {
  MemoryClient client;
  const auto worker = Worker::Open(SmallWorkerOptions(), &client).value();
  EXPECT_TRUE(worker->WaitPublished(Duration::zero()).ok());
}

}  // namespace
}  // namespace crumb::client
