// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The acknowledgements of crumbd hold after kill -9. The table of acknowledgements in
// docs/architecture.md lists the promise of each; full_disk_test.cc tests the same without room on
// the disk.

#include <sys/resource.h>

#include <vector>

#include "tests/common/eventually.h"
#include "tests/fault/acknowledgements_fixture.h"
#include "tests/fault/notice_reader.h"

namespace crumb::fault {
namespace {

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

TEST_F(AcknowledgementsTest, PinsEndWithATakeover) {
  Start();
  ASSERT_EQ(Publish(0, 8).size(), 8u);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  PinAll(0, 8);
  ASSERT_NO_FATAL_FAILURE(TakeOver());
  EXPECT_EQ(CountInMemory(0, 8), 8u);
  EXPECT_TRUE(Eventually([&] {
    PushOut();
    return CountInMemory(0, 8) == 0;
  }));
  EXPECT_EQ(CountThere({0, 1, 2, 3, 4, 5, 6, 7}), 8u) << "a page keeps its place on SSD";
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
  const std::vector<uint64_t> stored = Publish(0, 8);  // pages that the queue has room for
  EXPECT_EQ(crumbd_.Stop(), 0);
  Start();
  EXPECT_EQ(CountThere(stored), stored.size());
}

// Each notice says that a page is durable: a page that was noticed before the kill is there after
// it.
TEST_F(AcknowledgementsTest, PagesOfDurableNoticesAreThereAfterAKill) {
  for (int round = 0; round < FaultRounds(3); ++round) {
    Start();
    NoticeReader reader(crumbd_.socket_dir());
    const int first = 1'000 * round;
    reader.Commit(first, 200);
    EXPECT_TRUE(Eventually([&] { return reader.Noticed().size() >= 50; }));
    crumbd_.Kill();
    const std::set<std::string> noticed = reader.Noticed();
    std::cout << noticed.size() << " of 200 pages were noticed before the kill" << std::endl;
    EXPECT_GE(noticed.size(), 50u);
    Start();
    EXPECT_EQ(NoticeReader(crumbd_.socket_dir()).CountThere(noticed), noticed.size());
    crumbd_.Kill();
  }
}

}  // namespace
}  // namespace crumb::fault
