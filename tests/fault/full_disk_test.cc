// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The acknowledgements of crumbd hold on a full disk, and a refused request is an error that has
// changed nothing. The table of acknowledgements in docs/architecture.md lists the promise of each.

#include <sched.h>
#include <sys/mount.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/common/eventually.h"
#include "tests/fault/acknowledgements_fixture.h"
#include "tests/fault/notice_reader.h"

namespace crumb::fault {
namespace {

using std::chrono::seconds;

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
  // Fills the disk, and publishes pages until one has no room: files that are there have room for
  // some. Returns the pages.
  std::vector<uint64_t> FillForPages() {
    Fill();
    std::vector<uint64_t> published;
    uint64_t next = 900'000;
    EXPECT_TRUE(Eventually([&] {
      for (const uint64_t number : Publish(next, 8)) published.push_back(number);
      next += 8;
      return !client_->Flush(kWait).ok();
    })) << "the disk was not full";
    return published;
  }
  std::string Log() const {
    std::stringstream text;
    text << std::ifstream(crumbd_.socket_dir() + "/crumbd.log").rdbuf();
    return text.str();
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
  const auto state_of = [&] { return KnownPages::Open(*client_).value().keyspace().state; };
  const client::KeyspaceState expected_state =
      state.ok() ? client::KeyspaceState::kBf16 : client::KeyspaceState::kActive;
  EXPECT_EQ(state_of(), expected_state) << state;
  const uint64_t before = pages_->keyspace().generation;
  const auto generation = client_->DropKeyspace(id);
  std::cout << deleted.size() << " deletions acknowledged, " << refused << " refused; state "
            << state << "; drop " << generation.status() << std::endl;
  EXPECT_GT(refused, 0) << "the disk was not full";
  const uint64_t after = KnownPages::Open(*client_).value().keyspace().generation;
  if (generation.ok()) {
    EXPECT_EQ(after, *generation);
  }
  // A drop that is refused has either changed nothing, or older pages are served no more.
  EXPECT_EQ(CountThere({20, 21, 22}),
            after == before && expected_state != client::KeyspaceState::kBf16 ? 3u : 0u);
  crumbd_.Kill();
  MakeRoom();
  Start();
  EXPECT_EQ(pages_->keyspace().state, expected_state) << "as the response said";
  EXPECT_EQ(pages_->keyspace().generation, after) << "as the response said";
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

// A page is durable, and its notice sent, or it is not, and no notice is.
TEST_F(FullDiskTest, NoNoticeIsSentOfPagesThatAreNotDurable) {
  NoticeReader reader(crumbd_.socket_dir());
  reader.Commit(0, 20);
  EXPECT_TRUE(Eventually([&] { return reader.Noticed().size() == 20; }));
  Fill();
  reader.Commit(100, 1'500);
  // The reports of Flush and the notices are about the same pages.
  const auto report = client_->FlushPages(kWait);
  ASSERT_TRUE(report.ok()) << report.status();
  const uint64_t missing = report->tier_off_pages + report->no_room_pages;
  EXPECT_GT(missing, 0u) << "the disk was not full";
  std::this_thread::sleep_for(seconds(1));  // notices of durable pages arrive meanwhile
  const std::set<std::string> noticed = reader.Noticed();
  std::cout << noticed.size() << " of 1520 pages were noticed, " << missing << " have no room"
            << std::endl;
  EXPECT_LE(noticed.size(), 1'520 - missing);
  crumbd_.Kill();
  MakeRoom();
  Start();
  EXPECT_EQ(NoticeReader(crumbd_.socket_dir()).CountThere(noticed), noticed.size());
}

TEST_F(FullDiskTest, ATakeoverKeepsThePagesThatAreInMemoryAlone) {
  const std::vector<uint64_t> durable = Publish(0, 20);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  FillForPages();
  const std::vector<uint64_t> in_memory = Publish(20, 40);
  ASSERT_EQ(in_memory.size(), 40u);
  EXPECT_FALSE(client_->Flush(kWait).ok());
  ASSERT_NO_FATAL_FAILURE(TakeOver());
  EXPECT_EQ(CountThere(durable), durable.size());
  EXPECT_EQ(CountThere(in_memory), in_memory.size());
  EXPECT_FALSE(client_->Flush(kWait).ok()) << "the disk is as full as before";
  MakeRoom();
  EXPECT_TRUE(Eventually([&] { return client_->Flush(kWait).ok(); }, kWait));
  KillAndStart();
  EXPECT_EQ(CountThere(durable), durable.size());
  EXPECT_EQ(CountThere(in_memory), in_memory.size());
}

TEST_F(FullDiskTest, AnOrderlyEndNamesThePagesThatItLoses) {
  const std::vector<uint64_t> durable = Publish(0, 20);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  std::vector<uint64_t> stored = FillForPages();
  for (const uint64_t number : Publish(20, 40)) stored.push_back(number);
  const auto report = client_->FlushPages(kWait);
  ASSERT_TRUE(report.ok()) << report.status();
  const uint64_t missing = report->tier_off_pages + report->no_room_pages;
  ASSERT_GT(missing, 0u) << "the disk was not full";
  crumbd_.Stop();
  const std::string lost = std::to_string(missing) + " pages are in host memory alone";
  EXPECT_NE(Log().find(lost), std::string::npos) << Log();
  MakeRoom();
  ASSERT_TRUE(crumbd_.Start());
  ASSERT_TRUE(client_->WaitConnected(kWait));
  Connect();
  EXPECT_EQ(CountThere(durable), durable.size());
  EXPECT_EQ(CountThere(stored), stored.size() - missing);
}

TEST_F(FullDiskTest, AKeyspaceThatCannotBeRecordedIsNotOpen) {
  Publish(0, 8);
  ASSERT_TRUE(client_->Flush(kWait).ok());
  FillForPages();
  const auto open = [&](const std::string& model) {
    client::KeyspaceSpec spec;
    spec.fields = {{"model", model}, {"long", std::string(500, 'l')}};
    spec.layers = 2;
    spec.kv_heads = 2;
    spec.head_dim = 64;
    spec.group_size = 64;
    return client_->OpenKeyspace(spec, seconds(5)).status();
  };
  const auto listed = [&] {
    std::set<KeyspaceId> ids;
    const absl::StatusOr<client::CacheStats> stats = client_->Stats();
    if (!stats.ok()) return ids;
    for (const auto& keyspace : stats->keyspaces) ids.insert(keyspace.id);
    return ids;
  };
  // The index may have room for some records that the disk gave it before.
  std::string refused;
  std::set<KeyspaceId> before;
  for (int i = 0; i < 200 && refused.empty(); ++i) {
    before = listed();
    const absl::Status opened = open("m" + std::to_string(i));
    if (opened.ok()) continue;
    refused = "m" + std::to_string(i);
    std::cout << i << " keyspaces were opened, then: " << opened << std::endl;
  }
  ASSERT_FALSE(refused.empty()) << "the disk was not full";
  EXPECT_EQ(listed(), before);
  crumbd_.Kill();
  MakeRoom();
  Start();
  EXPECT_EQ(listed(), before) << "as the response said";
  EXPECT_TRUE(open(refused).ok());
  EXPECT_EQ(listed().size(), before.size() + 1);
}

TEST_F(FullDiskTest, AReleaseNeedsNoDisk) {
  FillForPages();
  ASSERT_EQ(Publish(0, 8).size(), 8u);
  auto leases = LeaseOf(8);
  ASSERT_EQ(leases.size(), 8u);
  EXPECT_EQ(client_->Stats()->leases, 8u);
  leases.clear();
  EXPECT_TRUE(Eventually([&] { return client_->Stats()->leases == 0; }));
  EXPECT_TRUE(Eventually([&] {
    PushOut();
    return CountInMemory(0, 8) == 0;
  })) << "their memory is used again";
}

}  // namespace
}  // namespace crumb::fault
