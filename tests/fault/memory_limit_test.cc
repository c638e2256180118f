// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumbd is killed while its slabs take 90 % of its memory limit and workers decode from them. The
// next one cannot have that memory yet: it serves with the memory that is free and has all of it
// soon after the workers have let go. No worker loses a token: those that go on decoding all the
// time, and one that holds a sequence across.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <iostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "crumb/client.h"
#include "crumb/worker.h"
#include "tests/client/sequence_model.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/memory_group.h"

namespace crumb::fault {
namespace {

using client::RandomTokens;
using client::Sequence;
using client::SequenceModel;
using client::SmallWorkerOptions;
using client::Worker;
using std::chrono::seconds;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kLimitBytes = 1024 * kMiB;
constexpr uint64_t kHostBytes = kLimitBytes / 10 * 9 / kMiB * kMiB;
constexpr int kPrompt = 1100;
constexpr int kHit = 832;  // tokens of it that a hit may supply
constexpr int kDecodeSteps = 6;
constexpr auto kCapacityBack = seconds(60);

std::unique_ptr<client::Client> OpenClient(const std::string& dir) {
  client::ClientOptions options;
  options.socket_dir = dir;
  options.staging_bytes = 8 << 20;
  options.backoff_min = std::chrono::milliseconds(10);
  options.backoff_max = std::chrono::milliseconds(100);
  return client::Client::Open(options).value();
}

std::vector<float> Decode(const SequenceModel& model, Sequence& sequence, int steps) {
  if (sequence.length() < kPrompt) model.Pass(sequence, kPrompt);
  std::vector<float> outputs;
  for (int i = 0; i < steps; ++i) {
    const auto out = model.Pass(sequence, sequence.length() + 1);
    outputs.insert(outputs.end(), out.begin(), out.end());
  }
  return outputs;
}

// Workers that begin sequences, decode and end them, over and over, whatever crumbd does.
class Workers {
 public:
  // `expected`: outputs of the decode steps of every sequence.
  Workers(const std::string& dir, const SequenceModel& model, std::vector<float> expected)
      : model_(model), expected_(std::move(expected)) {
    for (Tally& tally : tallies_) {
      tally.thread = std::thread([this, dir, &tally] { Play(dir, tally); });
    }
  }
  ~Workers() { Stop(); }
  void Stop() {
    stop_ = true;
    for (Tally& tally : tallies_) {
      if (tally.thread.joinable()) tally.thread.join();
    }
  }

  // Waits until each of them has begun and ended a sequence from now on.
  bool AwaitOne() {
    std::array<int, kWorkers> since;
    for (size_t i = 0; i < kWorkers; ++i) since[i] = tallies_[i].played;
    return Eventually([&] {
      for (size_t i = 0; i < kWorkers; ++i) {
        if (tallies_[i].played < since[i] + 2) return false;  // the first may be under way
      }
      return true;
    });
  }
  // Waits until each of them has a whole hit from now on.
  bool AwaitHits() {
    std::array<int, kWorkers> since;
    for (size_t i = 0; i < kWorkers; ++i) since[i] = tallies_[i].hits;
    return Eventually([&] {
      for (size_t i = 0; i < kWorkers; ++i) {
        if (tallies_[i].hits == since[i]) return false;
      }
      return true;
    });
  }
  int played() const { return Sum(&Tally::played); }
  int wrong() const { return Sum(&Tally::wrong); }

 private:
  static constexpr size_t kWorkers = 3;
  struct Tally {
    std::atomic<int> played{0};
    std::atomic<int> hits{0};
    std::atomic<int> wrong{0};
    std::thread thread;
  };

  int Sum(std::atomic<int> Tally::*count) const {
    int sum = 0;
    for (const Tally& tally : tallies_) sum += (tally.*count).load();
    return sum;
  }
  void Play(const std::string& dir, Tally& tally) {
    const auto client = OpenClient(dir);
    const auto worker = Worker::Open(SmallWorkerOptions(), client.get()).value();
    client::SequenceOptions options;
    options.publish = client::Publish::kNone;
    options.deadline = seconds(20);
    while (!stop_) {
      const auto sequence = worker->Begin(model_.prompt(kPrompt), options);
      if (sequence.ok() && (*sequence)->cached_tokens() == kHit) ++tally.hits;
      if (!sequence.ok() || Decode(model_, **sequence, kDecodeSteps) != expected_) ++tally.wrong;
      ++tally.played;
    }
  }

  const SequenceModel& model_;
  const std::vector<float> expected_;
  std::atomic<bool> stop_{false};
  std::array<Tally, kWorkers> tallies_;
};

TEST(MemoryLimitTest, AKilledCrumbdIsReplacedWithinTheSameLimit) {
  const MemoryGroup group(kLimitBytes);
  std::cout << (group.folder().empty() ? "no control group can be made: without a limit"
                                       : "limited by " + group.folder())
            << std::endl;
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), {.host_bytes = kHostBytes, .control_group = group.folder()});
  ASSERT_TRUE(crumbd.Start());
  const SequenceModel model(SmallWorkerOptions(), RandomTokens(kPrompt + 100, 42));
  const auto cold_worker = Worker::Open(SmallWorkerOptions(), nullptr).value();
  const auto cold =
      Decode(model, *cold_worker->Begin(model.prompt(kPrompt)).value(), 2 * kDecodeSteps);

  const auto client = OpenClient(folder.path());
  ASSERT_EQ(HostCapacity(*client), kHostBytes);
  const auto worker = Worker::Open(SmallWorkerOptions(), client.get()).value();
  {
    const auto first = worker->Begin(model.prompt(kPrompt)).value();
    model.Pass(*first, kPrompt);
    ASSERT_TRUE(first->Finish().ok());
    ASSERT_TRUE(worker->WaitPublished(seconds(30)).ok());
    ASSERT_TRUE(client->Flush(seconds(30)).ok());
  }
  client::SequenceOptions patient;
  patient.deadline = seconds(20);
  auto sequence = worker->Begin(model.prompt(kPrompt), patient).value();
  ASSERT_EQ(sequence->cached_tokens(), kHit);
  std::vector<float> outputs = Decode(model, *sequence, kDecodeSteps);
  Workers workers(folder.path(), model,
                  std::vector<float>(cold.begin(), cold.begin() + cold.size() / 2));
  ASSERT_TRUE(workers.AwaitHits());

  crumbd.Kill();
  EXPECT_TRUE(workers.AwaitOne()) << "without crumbd";
  ASSERT_TRUE(crumbd.Start()) << "the memory of the one before was in its way";
  ASSERT_TRUE(client->WaitConnected(seconds(30)));
  // The sequence keeps the memory of the one before mapped, and goes on with it.
  if (!group.folder().empty()) {
    EXPECT_LT(HostCapacity(*client), kHostBytes);
  }
  const std::vector<float> rest = Decode(model, *sequence, kDecodeSteps);
  outputs.insert(outputs.end(), rest.begin(), rest.end());
  EXPECT_TRUE(outputs == cold) << "tokens differ from a run without crumbd";
  EXPECT_TRUE(workers.AwaitHits()) << "of the next crumbd";

  sequence.reset();
  const TimePoint released = Clock::Real().Now();
  EXPECT_TRUE(Eventually([&] { return HostCapacity(*client) == kHostBytes; }, kCapacityBack))
      << HostCapacity(*client) << " of " << kHostBytes;
  std::cout << "full capacity after "
            << std::chrono::duration<double>(Clock::Real().Now() - released).count() << " s\n";
  workers.Stop();
  EXPECT_EQ(workers.wrong(), 0) << "of " << workers.played() << " sequences";
  std::cout << workers.played() << " sequences of workers that went on\n";
  const auto again = worker->Begin(model.prompt(kPrompt), patient).value();
  EXPECT_EQ(again->cached_tokens(), kHit);  // the SSD has all pages
  EXPECT_EQ(crumbd.Stop(), 0);
}

}  // namespace
}  // namespace crumb::fault
