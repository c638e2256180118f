// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <vector>

#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"

namespace crumb::fault {

using std::chrono::seconds;

inline constexpr uint64_t kHostBytes = uint64_t{32} << 20;
inline constexpr auto kWait = seconds(30);
inline constexpr auto kPinFor = std::chrono::hours(1);

// One crumbd, and a worker of it that knows which pages it published.
class AcknowledgementsTest : public testing::Test {
 protected:
  explicit AcknowledgementsTest(uint64_t ssd_bytes = uint64_t{512} << 20)
      : crumbd_(folder_.path(), {.host_bytes = kHostBytes,
                                 .ssd_bytes = ssd_bytes,
                                 .more = "    write_queue_pages_max: 8\n"}) {}

  void Connect() {
    pages_.reset();
    client_.reset();
    auto client = fault::Connect(folder_.path(), "acknowledged");
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto pages = KnownPages::Open(*client_);
    ASSERT_TRUE(pages.ok()) << pages.status();
    pages_ = *std::move(pages);
  }
  void Start() {
    ASSERT_TRUE(crumbd_.Start());
    Connect();
  }
  void KillAndStart() {
    crumbd_.Kill();
    Start();
  }
  // Starts another crumbd that takes over from this one.
  void TakeOver() {
    const pid_t before = crumbd_.pid();
    const pid_t successor = crumbd_.StartSuccessor();
    ASSERT_GT(successor, 0);
    int status = 0;
    ASSERT_TRUE(Eventually([&] { return ::waitpid(before, &status, WNOHANG) == before; }));
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    crumbd_.Follow(successor);
    ASSERT_TRUE(crumbd_.WaitServing());
    Connect();
  }
  // Publishes pages [first, first + count) and returns those that were stored.
  std::vector<uint64_t> Publish(uint64_t first, uint64_t count) {
    std::vector<uint64_t> stored;
    for (uint64_t at = first; at < first + count;) {
      const auto outcomes = pages_->Publish(
          *client_, at, static_cast<int>(std::min<uint64_t>(8, first + count - at)));
      EXPECT_TRUE(outcomes.ok()) << outcomes.status();
      if (!outcomes.ok()) return stored;
      for (size_t i = 0; i < outcomes->size(); ++i, ++at) {
        if ((*outcomes)[i] == client::CommitOutcome::kStored) stored.push_back(at);
      }
    }
    return stored;
  }
  bool IsThere(uint64_t number) {
    const auto right = pages_->ReadBack(*client_, number, seconds(5));
    EXPECT_FALSE(absl::IsDataLoss(right.status())) << right.status();
    return right.ok() && *right;
  }
  uint64_t CountThere(const std::vector<uint64_t>& numbers) {
    uint64_t there = 0;
    for (const uint64_t number : numbers) there += IsThere(number) ? 1 : 0;
    return there;
  }
  // Publishes as many pages as host memory has room for, and as many again, so that every older
  // page leaves it that nothing keeps there.
  void PushOut() {
    const uint64_t count = 2 * kHostBytes / pages_->fragment_bytes();
    Publish(next_, count);
    next_ += count;
  }
  void PinAll(uint64_t first, uint64_t count) {
    for (uint64_t number = first; number < first + count; ++number) {
      const PageKey key = pages_->Key(number);
      const auto pinned = client_->Pin(pages_->keyspace().id, std::span(&key, 1), kPinFor);
      ASSERT_TRUE(pinned.ok()) << pinned.status();
      EXPECT_EQ(*pinned, 1u) << number;
    }
  }
  // Counts the pages [first, first + count) that are in host memory.
  uint64_t CountInMemory(uint64_t first, uint64_t count) {
    uint64_t in_memory = 0;
    for (uint64_t number = first; number < first + count; ++number) {
      const PageKey key = pages_->Key(number);
      const auto found = client_->Lookup(pages_->keyspace().id, std::span(&key, 1));
      EXPECT_TRUE(found.ok()) << found.status();
      if (!found.ok()) continue;
      if (found->hit_pages == 1 && found->page_tiers[0] == client::Tier::kHost) ++in_memory;
    }
    return in_memory;
  }
  // Leases of pages [0, count), one each.
  std::vector<client::AcquireResult> LeaseOf(uint64_t count) {
    std::vector<client::AcquireResult> leases;
    for (uint64_t number = 0; number < count; ++number) {
      const PageKey key = pages_->Key(number);
      client::AcquireRequest request;
      request.keyspace = pages_->keyspace().id;
      request.generation = pages_->keyspace().generation;
      request.keys = std::span(&key, 1);
      request.timeout = seconds(5);
      auto result = client_->Acquire(request);
      EXPECT_TRUE(result.ok()) << result.status();
      if (!result.ok()) return {};
      EXPECT_EQ(result->hit_pages, 1);
      leases.push_back(*std::move(result));
    }
    return leases;
  }
  void ExpectLeasedBytes(const std::vector<client::AcquireResult>& leases, uint64_t count) const {
    ASSERT_EQ(leases.size(), count);
    for (uint64_t number = 0; number < count; ++number) {
      const auto fragments = leases[number].lease->fragments();
      ASSERT_EQ(fragments.size(), 1u);
      const auto expected = pages_->Fragment(number);
      EXPECT_TRUE(
          std::equal(fragments[0].tiles.begin(), fragments[0].tiles.end(), expected.begin()))
          << number;
    }
  }
  // Flush reports how many of `stored` a restart does not find, and is OK only where that is none.
  FlushReport ExpectFlushIsTrue(const std::vector<uint64_t>& stored,
                                const std::function<void()>& before_restart) {
    const auto report = client_->FlushPages(kWait);
    EXPECT_TRUE(report.ok()) << report.status();
    if (!report.ok()) return FlushReport();
    const uint64_t missing = report->tier_off_pages + report->no_room_pages + report->lost_pages;
    EXPECT_EQ(report->ToStatus().ok(), missing == 0);
    std::cout << stored.size() << " stored; " << report->ToStatus() << std::endl;
    crumbd_.Kill();
    before_restart();
    Start();
    EXPECT_EQ(CountThere(stored), stored.size() - missing);
    return *report;
  }

  TemporaryFolder folder_;
  CrumbdProcess crumbd_;
  std::unique_ptr<client::Client> client_;
  std::optional<KnownPages> pages_;
  uint64_t next_ = 100'000;  // number of PushOut's next page
};

}  // namespace crumb::fault
