// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumbd is killed in the middle of writes and reads, and started again. No wrong byte is served,
// everything that Flush reported is there, and nearly everything committed five seconds before.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <iostream>
#include <random>
#include <thread>
#include <vector>

#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"

namespace crumb::fault {
namespace {

using std::chrono::steady_clock;

constexpr int kBatch = 8;
constexpr double kSettledShare = 0.95;
constexpr auto kSettleTime = std::chrono::seconds(5);
// The load stays below a disk's throughput: this test is about order.
constexpr auto kBatchPause = std::chrono::milliseconds(15);

// More than a round writes at its pace.
constexpr uint64_t kRoundBytesMax = uint64_t{320} << 20;

struct CommittedPage {
  uint64_t number;
  steady_clock::time_point when;
};

// Facts that one round's writer knows.
struct Written {
  std::vector<CommittedPage> committed;
  size_t durable = 0;  // the first so many of `committed`
};

class Load {
 public:
  Load(const std::string& socket_dir, uint64_t first) : first_(first), socket_dir_(socket_dir) {
    writer_ = std::thread([this] { Write(); });
    reader_ = std::thread([this] { Read(); });
  }
  // Ends after the crumbd it talks to.
  Written Finish() {
    stop_ = true;
    writer_.join();
    reader_.join();
    return std::move(written_);
  }
  int wrong() const { return wrong_; }

 private:
  void Write() {
    auto client = Connect(socket_dir_, "writer");
    if (!client.ok()) return;
    auto pages = KnownPages::Open(**client);
    if (!pages.ok()) return;
    for (uint64_t batch = 0; !stop_; ++batch) {
      const uint64_t first = first_ + batch * kBatch;
      const auto outcomes = pages->Publish(**client, first, kBatch);
      if (!outcomes.ok()) return;
      for (size_t i = 0; i < outcomes->size(); ++i) {
        if ((*outcomes)[i] == client::CommitOutcome::kStored) {
          written_.committed.push_back({first + i, steady_clock::now()});
        }
      }
      highest_ = first + kBatch;
      if (batch % 16 == 15) {
        const size_t before = written_.committed.size();
        if ((*client)->Flush(std::chrono::seconds(10)).ok()) written_.durable = before;
      }
      std::this_thread::sleep_for(kBatchPause);
    }
  }

  void Read() {
    auto client = Connect(socket_dir_, "reader");
    if (!client.ok()) return;
    auto pages = KnownPages::Open(**client);
    if (!pages.ok()) return;
    std::mt19937_64 random(first_);
    while (!stop_) {
      const uint64_t end = highest_;
      const uint64_t number = end == 0 ? 0 : random() % end;
      const auto right = pages->ReadBack(**client, number, std::chrono::milliseconds(200));
      if (right.status().code() == absl::StatusCode::kDataLoss) ++wrong_;
      if (right.status().code() == absl::StatusCode::kUnavailable) return;
    }
  }

  const uint64_t first_;
  const std::string socket_dir_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> highest_{0};
  std::atomic<int> wrong_{0};
  Written written_;
  std::thread writer_;
  std::thread reader_;
};

struct Recovered {
  int wrong = 0;
  size_t durable_missing = 0;
  size_t settled = 0;
  size_t settled_missing = 0;
};

Recovered Examine(const std::string& socket_dir, const Written& written,
                  steady_clock::time_point killed) {
  Recovered recovered;
  auto client = Connect(socket_dir, "examiner");
  EXPECT_TRUE(client.ok()) << client.status();
  auto pages = KnownPages::Open(**client);
  EXPECT_TRUE(pages.ok()) << pages.status();
  if (!pages.ok()) return recovered;
  for (size_t i = 0; i < written.committed.size(); ++i) {
    const CommittedPage& page = written.committed[i];
    const auto right = pages->ReadBack(**client, page.number, std::chrono::seconds(5));
    if (right.status().code() == absl::StatusCode::kDataLoss) ++recovered.wrong;
    const bool missing = !right.ok() || !*right;
    if (i < written.durable && missing) ++recovered.durable_missing;
    if (page.when + kSettleTime <= killed) {
      ++recovered.settled;
      if (missing) ++recovered.settled_missing;
    }
  }
  return recovered;
}

TEST(CrumbdKillTest, ServesOnlyWhatWasCommittedAndLosesNothingDurable) {
  const int rounds = FaultRounds(2);
  const uint64_t seed = std::random_device()();
  std::cout << "seed " << seed << ", " << rounds << " rounds\n";
  std::mt19937_64 random(seed);
  TemporaryFolder folder;
  // Room for every page of all rounds: eviction must not count as loss.
  CrumbdProcess crumbd(
      folder.path(),
      {.host_bytes = 64 << 20, .ssd_bytes = kRoundBytesMax * static_cast<uint64_t>(rounds + 2)});
  size_t settled = 0;
  size_t settled_missing = 0;
  size_t durable = 0;
  uint64_t next = 0;
  for (int round = 0; round < rounds; ++round) {
    ASSERT_TRUE(crumbd.Start());
    Load load(crumbd.socket_dir(), next);
    std::this_thread::sleep_for(std::chrono::milliseconds(5300 + random() % 1500));
    const auto killed = steady_clock::now();
    crumbd.Kill();
    const Written written = load.Finish();
    ASSERT_EQ(load.wrong(), 0);
    ASSERT_FALSE(written.committed.empty());
    next = written.committed.back().number + kBatch;

    ASSERT_TRUE(crumbd.Start());
    const Recovered recovered = Examine(crumbd.socket_dir(), written, killed);
    crumbd.Kill();
    EXPECT_EQ(recovered.wrong, 0);
    EXPECT_EQ(recovered.durable_missing, 0u) << "of " << written.durable;
    settled += recovered.settled;
    settled_missing += recovered.settled_missing;
    durable += written.durable;
    std::cout << "round " << round << ": " << written.committed.size() << " committed, "
              << written.durable << " durable, " << recovered.settled << " settled, "
              << recovered.settled_missing << " of them gone" << std::endl;
  }
  EXPECT_GT(durable, 0u);
  ASSERT_GT(settled, 0u);
  EXPECT_GE(1.0 - static_cast<double>(settled_missing) / static_cast<double>(settled),
            kSettledShare);
}

}  // namespace
}  // namespace crumb::fault
