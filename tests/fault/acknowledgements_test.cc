// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// What crumbd acknowledged holds after kill -9, on a disk with room and on a full one. The table in
// docs/architecture.md, "What an acknowledgement means", says what each promises.

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"

namespace crumb::fault {
namespace {

using std::chrono::seconds;

constexpr uint64_t kHostBytes = uint64_t{32} << 20;
constexpr auto kWait = seconds(30);
constexpr auto kPinFor = std::chrono::hours(1);

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
  // Flush tells how many of `stored` a restart does not find, and is OK only where that is none.
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

// The SSD tier can write nothing while host memory takes its pages in one after the other: those
// that leave it are lost, whatever the disk's speed.
TEST_F(AcknowledgementsTest, FlushNamesWhatIsNotDurable) {
  Start();
  rlimit limit{};
  ASSERT_EQ(::prlimit(crumbd_.pid(), RLIMIT_FSIZE, nullptr, &limit), 0);
  limit.rlim_cur = 4096;
  ASSERT_EQ(::prlimit(crumbd_.pid(), RLIMIT_FSIZE, &limit, nullptr), 0);
  const uint64_t fitting = kHostBytes / pages_->fragment_bytes();
  const std::vector<uint64_t> stored = Publish(0, 2 * fitting);
  ASSERT_GT(stored.size(), fitting);
  const FlushReport report = ExpectFlushIsTrue(stored, [] {});
  EXPECT_GE(report.lost_pages, stored.size() - fitting);
}

TEST_F(AcknowledgementsTest, AFlushBehindARestartNamesTheLoss) {
  Start();
  ASSERT_TRUE(client_->Flush(kWait).ok());
  const std::vector<uint64_t> stored = Publish(0, 64);
  crumbd_.Kill();
  ASSERT_TRUE(crumbd_.Start());
  ASSERT_TRUE(client_->WaitConnected(kWait));
  const auto flushed = client_->Flush(kWait);
  EXPECT_TRUE(absl::IsDataLoss(flushed.status())) << flushed.status();
  EXPECT_TRUE(client_->Flush(kWait).ok()) << "it was named once";
}

TEST_F(AcknowledgementsTest, DeletedAndDroppedPagesStayAway) {
  Start();
  const std::vector<uint64_t> stored = Publish(0, 64);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  const std::vector<PageKey> keys = {pages_->Key(1), pages_->Key(2)};
  const auto deleted = client_->Delete(pages_->keyspace().id, keys);
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(*deleted, 2u);
  KillAndStart();
  EXPECT_FALSE(IsThere(1));
  EXPECT_FALSE(IsThere(2));
  EXPECT_EQ(CountThere(stored), stored.size() - 2);
  const auto generation = client_->DropKeyspace(pages_->keyspace().id);
  ASSERT_TRUE(generation.ok()) << generation.status();
  KillAndStart();
  EXPECT_EQ(pages_->keyspace().generation, *generation);
  EXPECT_EQ(CountThere(stored), 0u);
}

TEST_F(AcknowledgementsTest, StatesOfKeyspacesStay) {
  Start();
  const KeyspaceId id = pages_->keyspace().id;
  ASSERT_TRUE(client_->SetKeyspaceState(id, client::KeyspaceState::kBf16, "test", "why").ok());
  KillAndStart();
  EXPECT_EQ(pages_->keyspace().state, client::KeyspaceState::kBf16);
}

TEST_F(AcknowledgementsTest, PinnedPagesAreNotEvictedAndPinsEndWithCrumbd) {
  Start();
  ASSERT_EQ(Publish(0, 8).size(), 8u);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  PinAll(0, 8);
  PushOut();
  EXPECT_EQ(CountInMemory(0, 8), 8u);
  KillAndStart();
  EXPECT_EQ(CountThere({0, 1, 2, 3, 4, 5, 6, 7}), 8u) << "a page keeps its place on SSD";
  // A busy machine may refuse pages, and then so many push nothing out yet.
  EXPECT_TRUE(Eventually([&] {
    PushOut();
    return CountInMemory(0, 8) == 0;
  }));
}

TEST_F(AcknowledgementsTest, LeasedBytesStayAndLeasesEndWithCrumbd) {
  Start();
  ASSERT_EQ(Publish(0, 8).size(), 8u);
  const auto lease = LeaseOf(8);
  PushOut();
  ExpectLeasedBytes(lease, 8);
  KillAndStart();
  ExpectLeasedBytes(lease, 8);
  const auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->leases, 0u);
  PushOut();  // the new crumbd has memory of its own
  ExpectLeasedBytes(lease, 8);
}

// The kernel sends SIGXFSZ to a process that writes beyond its limit.
TEST_F(AcknowledgementsTest, AFileSizeLimitIsAFullDisk) {
  Start();
  const std::vector<uint64_t> stored = Publish(0, 8);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  rlimit limit;
  ASSERT_EQ(::prlimit(crumbd_.pid(), RLIMIT_FSIZE, nullptr, &limit), 0);
  limit.rlim_cur = 4096;
  ASSERT_EQ(::prlimit(crumbd_.pid(), RLIMIT_FSIZE, &limit, nullptr), 0);
  EXPECT_EQ(Publish(8, 8).size(), 8u);
  EXPECT_FALSE(client_->Flush(kWait).ok());
  EXPECT_EQ(CountThere(stored), stored.size()) << "crumbd goes on";
  KillAndStart();
  EXPECT_EQ(CountThere(stored), stored.size());
}

TEST_F(AcknowledgementsTest, AnOrderlyEndWritesWhatIsQueued) {
  Start();
  const std::vector<uint64_t> stored = Publish(0, 8);  // what the queue has room for
  EXPECT_EQ(crumbd_.Stop(), 0);
  Start();
  EXPECT_EQ(CountThere(stored), stored.size());
}

// The SSD folder is a file system of its own, seen by this test and its children alone.
class FullDiskTest : public AcknowledgementsTest {
 protected:
  FullDiskTest() : AcknowledgementsTest(uint64_t{32} << 20) {}
  void SetUp() override {
    std::filesystem::create_directories(crumbd_.ssd_path());
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", crumbd_.ssd_path().c_str(), "tmpfs", 0, "size=40m") != 0) {
      GTEST_SKIP() << "needs the right to mount, as root has it";
    }
    Start();
  }
  void TearDown() override {
    crumbd_.Kill();
    ::umount2(crumbd_.ssd_path().c_str(), MNT_DETACH);
  }
  void Fill() {
    std::ofstream file(Ballast(), std::ios::binary);
    const std::vector<char> block(4096);
    while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  std::string Ballast() const { return crumbd_.ssd_path() + "/lost+found"; }
  void MakeRoom() { std::filesystem::remove(Ballast()); }
};

TEST_F(FullDiskTest, FlushNamesThePagesWithoutRoom) {
  std::vector<uint64_t> stored = Publish(0, 20);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  Fill();
  for (const uint64_t number : Publish(20, 300)) stored.push_back(number);
  const auto report = client_->FlushPages(kWait);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT(report->tier_off_pages + report->no_room_pages, 0u);
  EXPECT_FALSE(client_->Flush(kWait).ok());
  const uint64_t missing = report->tier_off_pages + report->no_room_pages + report->lost_pages;
  crumbd_.Kill();
  MakeRoom();
  Start();
  EXPECT_EQ(CountThere(stored), stored.size() - missing);
}

TEST_F(FullDiskTest, WhatIsAcknowledgedStaysDone) {
  const std::vector<uint64_t> stored = Publish(0, 40);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  Fill();
  const KeyspaceId id = pages_->keyspace().id;
  std::set<uint64_t> deleted;
  int refused = 0;
  for (uint64_t number = 0; number < 20; ++number) {
    const PageKey key = pages_->Key(number);
    const auto gone = client_->Delete(id, std::span(&key, 1));
    if (gone.ok()) {
      deleted.insert(number);
    } else {
      EXPECT_TRUE(absl::IsUnavailable(gone.status())) << gone.status();
      ++refused;
    }
    EXPECT_FALSE(IsThere(number)) << "a page whose removal failed is served no more";
  }
  const auto state = client_->SetKeyspaceState(id, client::KeyspaceState::kBf16, "test", "why");
  const auto generation = client_->DropKeyspace(id);
  std::cout << deleted.size() << " deletions acknowledged, " << refused << " refused; state "
            << state << "; drop " << generation.status() << std::endl;
  EXPECT_GT(refused, 0) << "the disk was not full";
  crumbd_.Kill();
  MakeRoom();
  Start();
  if (state.ok()) {
    EXPECT_EQ(pages_->keyspace().state, client::KeyspaceState::kBf16);
  }
  if (generation.ok()) {
    EXPECT_EQ(pages_->keyspace().generation, *generation);
  }
  for (const uint64_t number : deleted) EXPECT_FALSE(IsThere(number)) << number;
}

TEST_F(FullDiskTest, ARestartServesWhatIsOnAFullDisk) {
  const std::vector<uint64_t> stored = Publish(0, 20);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  crumbd_.Kill();
  Fill();
  Start();
  EXPECT_EQ(CountThere(stored), stored.size());
  EXPECT_EQ(Publish(20, 8).size(), 8u) << "host memory takes pages without the disk";
  EXPECT_FALSE(client_->Flush(kWait).ok());
  MakeRoom();
  EXPECT_TRUE(Eventually([&] { return client_->Flush(kWait).ok(); }, kWait))
      << "the tier is written once there is room";
  KillAndStart();
  EXPECT_EQ(CountThere(stored), stored.size());
  EXPECT_TRUE(IsThere(20));
}

TEST_F(FullDiskTest, PinsAndLeasesHoldWithoutTheDisk) {
  Fill();
  ASSERT_EQ(Publish(0, 16).size(), 16u);
  const auto leases = LeaseOf(8);
  PinAll(8, 8);
  PushOut();
  ExpectLeasedBytes(leases, 8);
  EXPECT_EQ(CountInMemory(8, 8), 8u);
  EXPECT_TRUE(IsThere(8));
}

}  // namespace
}  // namespace crumb::fault
