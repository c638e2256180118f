// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Workers that share a device pool, of host memory; they and crumbd are killed. The workers are
// this program again, with arguments.

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "client/gpu/device/device_memory.h"
#include "client/gpu/pools/device_pool.h"
#include "client/rpc/pool_link.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"
#include "tests/fault/pool_worker.h"
#include "tests/fault/socket_proxy.h"
#include "tests/fault/tenants.h"

namespace crumb::fault {
namespace {

constexpr const char* kStored = "1";
constexpr const char* kDeduplicated = "2";
// Slots of 16 tiles in a handle of 2 MiB.
constexpr uint64_t kSlotBytes = 16 * 4608;
constexpr int kSlotsPerHandle = (2 << 20) / static_cast<int>(kSlotBytes);

class DevicePoolsTest : public testing::Test {
 protected:
  DevicePoolsTest() : DevicePoolsTest([](const std::string&) { return StoreSizes(); }) {}
  // Compares with the sizes that `sizes` returns for the folder.
  explicit DevicePoolsTest(const std::function<StoreSizes(const std::string&)>& sizes)
      : crumbd_(folder_.path(), sizes(folder_.path())) {}

  void SetUp() override {
    ASSERT_TRUE(crumbd_.Start());
    auto client = Connect(folder_.path(), "watcher");
    ASSERT_TRUE(client.ok()) << client.status();
    watcher_ = *std::move(client);
  }

  PoolWorkerOptions Options(const std::string& name) const {
    PoolWorkerOptions options;
    options.socket_dir = folder_.path();
    options.name = name;
    return options;
  }

  client::CacheStats::TierStats Device() {
    const auto stats = watcher_->Stats();
    if (!stats.ok()) return {};
    for (const auto& tier : stats->tiers) {
      if (tier.tier == client::Tier::kDevice) return tier;
    }
    return {};
  }
  uint64_t Counter(const std::string& name) {
    const auto stats = watcher_->Stats();
    return stats.ok() && stats->counters.contains(name) ? stats->counters.at(name) : 0;
  }

  // Waits for a blank slot and puts a page into it. A pool that joins again has none for a moment.
  static void Write(PoolWorker& worker, int page) {
    const std::string line = "write " + std::to_string(page);
    ASSERT_TRUE(Eventually([&] { return worker.Do(line).starts_with("slot"); }));
  }
  static void Publish(PoolWorker& worker, int page) {
    ASSERT_NO_FATAL_FAILURE(Write(worker, page));
    ASSERT_EQ(worker.Do("commit " + std::to_string(page)), kStored) << "page " << page;
  }

  TemporaryFolder folder_;
  CrumbdProcess crumbd_;
  std::unique_ptr<client::Client> watcher_;
};

TEST_F(DevicePoolsTest, AnotherProcessReadsWhatWasWrittenInPlace) {
  PoolWorker writer(Options("writer"));
  PoolWorker reader(Options("reader"));
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  ASSERT_EQ(reader.Do("wait 4"), "ok");
  for (int page = 0; page < 6; ++page) Publish(writer, page);
  EXPECT_EQ(reader.Do("acquire 0 8"), "hits 6 device 6 right 6");
  EXPECT_EQ(writer.Do("acquire 0 6"), "hits 6 device 6 right 6");
  EXPECT_EQ(Device().pages, 6u);
  EXPECT_EQ(Device().capacity_bytes, kSlotsPerHandle * kSlotBytes);
  // Both map the one handle.
  EXPECT_EQ(writer.Do("maps"), "1");
  EXPECT_EQ(reader.Do("maps"), "1");
  EXPECT_EQ(writer.Do("handles"), "1");
  EXPECT_EQ(reader.Stop(), 0);
  EXPECT_EQ(writer.Stop(), 0);
}

TEST_F(DevicePoolsTest, TheNextWorkerAdoptsThePoolOfAKilledOne) {
  {
    PoolWorker first(Options("first"));
    ASSERT_EQ(first.Do("wait 4"), "ok");
    for (int page = 0; page < 6; ++page) Publish(first, page);
    ASSERT_NO_FATAL_FAILURE(Write(first, 100));  // and never committed
    first.Kill();
  }
  // Slots that it had not committed are free, and pages that it had are there.
  EXPECT_TRUE(Eventually([&] { return Device().resident_bytes == 6 * kSlotBytes; }));
  EXPECT_EQ(Device().pages, 6u);
  PoolWorker second(Options("second"));
  ASSERT_EQ(second.Do("wait 4"), "ok");
  EXPECT_EQ(second.Do("handles"), "1");
  EXPECT_EQ(second.Do("acquire 0 7"), "hits 6 device 6 right 6");
  EXPECT_EQ(second.Do("acquire 100 101"), "hits 0 device 0 right 0");
}

TEST_F(DevicePoolsTest, AnotherDeviceHasAnotherPool) {
  PoolWorker one(Options("one"));
  ASSERT_EQ(one.Do("wait 4"), "ok");
  Publish(one, 0);
  PoolWorkerOptions other_device = Options("two");
  other_device.device = "another";
  PoolWorker two(other_device);
  ASSERT_EQ(two.Do("wait 4"), "ok");
  EXPECT_EQ(two.Do("acquire 0 1"), "hits 0 device 0 right 0");
  EXPECT_EQ(Device().capacity_bytes, 2 * kSlotsPerHandle * kSlotBytes);
}

TEST_F(DevicePoolsTest, BlankSlotsComeBackWhenAWorkerLeaves) {
  PoolWorker stays(Options("stays"));
  ASSERT_EQ(stays.Do("wait 4"), "ok");
  ASSERT_TRUE(Eventually([&] { return Device().resident_bytes == 4 * kSlotBytes; }));
  {
    PoolWorker leaves(Options("leaves"));
    ASSERT_EQ(leaves.Do("wait 4"), "ok");
    ASSERT_NO_FATAL_FAILURE(Write(leaves, 1));
    EXPECT_EQ(leaves.Stop(), 0);
  }
  EXPECT_TRUE(Eventually([&] { return Device().resident_bytes == 4 * kSlotBytes; }));
}

// A pool of one handle takes more pages than it has slots: the oldest move to host memory.
TEST_F(DevicePoolsTest, PagesMoveDownWhenThePoolIsFull) {
  constexpr int kPages = 2 * kSlotsPerHandle;
  PoolWorker worker(Options("worker"));
  ASSERT_EQ(worker.Do("wait 4"), "ok");
  for (int page = 0; page < kPages; ++page) {
    Publish(worker, page);
    ASSERT_EQ(worker.Do("free " + std::to_string(page)), "ok");
  }
  EXPECT_GT(Counter("crumb_device_demoted_slots_total"), 0u);
  EXPECT_EQ(Counter("crumb_device_dropped_slots_total"), 0u);
  EXPECT_LE(Device().pages, static_cast<uint64_t>(kSlotsPerHandle));
  // Every page is somewhere, and right: those in host memory are checked by the client.
  const std::string response = worker.Do("acquire 0 " + std::to_string(kPages));
  const std::string hits = "hits " + std::to_string(kPages) + " device ";
  ASSERT_EQ(response.substr(0, hits.size()), hits) << response;
  const int on_device = std::stoi(response.substr(hits.size()));
  EXPECT_GT(on_device, 0);
  EXPECT_LT(on_device, kPages);
  EXPECT_EQ(response, hits + std::to_string(on_device) + " right " + std::to_string(on_device));
}

TEST_F(DevicePoolsTest, PagesThatNoWorkerCopiesAreDroppedAndCounted) {
  constexpr int kPages = 2 * kSlotsPerHandle;
  PoolWorkerOptions options = Options("worker");
  options.demotes = false;
  PoolWorker worker(options);
  ASSERT_EQ(worker.Do("wait 4"), "ok");
  for (int page = 0; page < kPages; ++page) {
    Publish(worker, page);
    ASSERT_EQ(worker.Do("free " + std::to_string(page)), "ok");
  }
  EXPECT_GT(Counter("crumb_device_dropped_slots_total"), 0u);
  EXPECT_EQ(Counter("crumb_device_demoted_slots_total"), 0u);
  EXPECT_EQ(worker.Do("acquire 0 1"), "hits 0 device 0 right 0");
  const std::string last = std::to_string(kPages - 1);
  EXPECT_EQ(worker.Do("acquire " + last + " " + std::to_string(kPages)), "hits 1 device 1 right 1");
}

TEST_F(DevicePoolsTest, PagesInUseStayWhenThePoolIsFull) {
  PoolWorker worker(Options("worker"));
  ASSERT_EQ(worker.Do("wait 4"), "ok");
  for (int page = 0; page < kSlotsPerHandle; ++page) Publish(worker, page);
  EXPECT_EQ(worker.Do("write 99"), "none");
  for (int page = 0; page < kSlotsPerHandle; ++page) {
    EXPECT_EQ(worker.Do("check " + std::to_string(page)), "right") << "page " << page;
  }
  ASSERT_EQ(worker.Do("free 0"), "ok");
  EXPECT_TRUE(Eventually([&] { return worker.Do("write 99") != "none"; }));
}

TEST_F(DevicePoolsTest, WhatOneHoldsAnotherCannotTake) {
  PoolWorker holder(Options("holder"));
  PoolWorker other(Options("other"));
  ASSERT_EQ(holder.Do("wait 4"), "ok");
  ASSERT_EQ(other.Do("wait 4"), "ok");
  for (int page = 0; page < 4; ++page) Publish(other, page);
  ASSERT_EQ(holder.Do("acquire 0 4"), "hits 4 device 4 right 4");
  other.Kill();
  PoolWorker third(Options("third"));
  ASSERT_EQ(third.Do("wait 4"), "ok");
  for (int page = 10; page < 10 + kSlotsPerHandle; ++page) {
    const std::string number = std::to_string(page);
    if (third.Do("write " + number) == "none") break;
    ASSERT_EQ(third.Do("commit " + number), kStored);
  }
  EXPECT_EQ(holder.Do("acquire 0 4"), "hits 4 device 4 right 4");
}

// A worker that has the pool mapped and attends every slot of it is killed: all can be used again.
TEST_F(DevicePoolsTest, AKilledReaderLeavesEverySlot) {
  PoolWorker writer(Options("writer"));
  PoolWorkerOptions reads = Options("reader");
  reads.bytes_max = 0;
  reads.blank_slots = 0;
  PoolWorker reader(reads);
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  ASSERT_EQ(reader.Do("joined"), "ok");
  for (int page = 0; page < kSlotsPerHandle; ++page) Publish(writer, page);
  const std::string count = std::to_string(kSlotsPerHandle);
  ASSERT_EQ(reader.Do("acquire 0 " + count),
            "hits " + count + " device " + count + " right " + count);
  for (int page = 0; page < kSlotsPerHandle; ++page) {
    ASSERT_EQ(writer.Do("free " + std::to_string(page)), "ok");
  }
  EXPECT_EQ(writer.Do("write 99"), "none");
  EXPECT_EQ(reader.Do("taken"), count + " of " + count);
  reader.Kill();
  for (int page = 100; page < 100 + kSlotsPerHandle; ++page) {
    const std::string write = "write " + std::to_string(page);
    ASSERT_TRUE(Eventually([&] { return writer.Do(write) != "none"; })) << page;
  }
  EXPECT_TRUE(Eventually([&] {
    const auto stats = watcher_->Stats();
    return stats.ok() && stats->leases == 0 && stats->sessions == 2;
  }));
}

TEST_F(DevicePoolsTest, TheFirstOfTwoCopiesWins) {
  PoolWorker one(Options("one"));
  PoolWorker two(Options("two"));
  ASSERT_EQ(one.Do("wait 4"), "ok");
  ASSERT_EQ(two.Do("wait 4"), "ok");
  Publish(one, 5);
  ASSERT_NO_FATAL_FAILURE(Write(two, 5));
  EXPECT_EQ(two.Do("commit 5"), kDeduplicated);
  EXPECT_EQ(two.Do("check 5"), "right");  // its own copy stays its own
  EXPECT_EQ(Device().pages, 1u);
}

// Pages that live sequences hold outlive crumbd, and the next one knows them again.
TEST_F(DevicePoolsTest, WorkersGiveTheirPoolToTheNextCrumbd) {
  PoolWorker writer(Options("writer"));
  PoolWorker reader(Options("reader"));
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  ASSERT_EQ(reader.Do("wait 4"), "ok");
  for (int page = 0; page < 6; ++page) Publish(writer, page);
  for (int page = 6; page < 9; ++page) {
    Publish(writer, page);
    ASSERT_EQ(writer.Do("free " + std::to_string(page)), "ok");
  }
  ASSERT_EQ(reader.Do("acquire 0 3"), "hits 3 device 3 right 3");
  const std::string fds = writer.Do("fds");
  for (int restart = 0; restart < 3; ++restart) {
    crumbd_.Kill();
    for (int page = 0; page < 6; ++page) {
      ASSERT_EQ(writer.Do("check " + std::to_string(page)), "right");
    }
    ASSERT_TRUE(crumbd_.Start());
    ASSERT_TRUE(watcher_->WaitConnected(std::chrono::seconds(20)));
    const std::string of_writer = std::to_string(6 * (restart + 1));
    const std::string of_reader = std::to_string(3 * (restart + 1));
    ASSERT_TRUE(Eventually([&] { return writer.Do("reclaimed") == of_writer; }));
    ASSERT_TRUE(Eventually([&] { return reader.Do("reclaimed") == of_reader; }));
    ASSERT_EQ(writer.Do("wait 4"), "ok");
    ASSERT_EQ(reader.Do("wait 4"), "ok");
    // A worker may have connected twice to one crumbd: the pages that this crumbd knows count.
    ASSERT_TRUE(Eventually([&] { return Device().pages == 6; }));
    PoolWorker fresh(Options("fresh"));
    ASSERT_EQ(fresh.Do("wait 4"), "ok");
    // Pages without a holder are gone.
    EXPECT_EQ(fresh.Do("acquire 0 9"), "hits 6 device 6 right 6") << "restart " << restart;
    EXPECT_EQ(Device().capacity_bytes, kSlotsPerHandle * kSlotBytes);
    EXPECT_EQ(fresh.Stop(), 0);
    EXPECT_TRUE(Eventually([&] { return writer.Do("fds") == fds; }));
    EXPECT_EQ(writer.Do("maps"), "1");
  }
  // They go on as before.
  Publish(writer, 20);
  EXPECT_EQ(reader.Do("acquire 20 21"), "hits 1 device 1 right 1");
}

// A worker that holds a page's slot brings the slot back to the next crumbd, but not the page.
TEST_F(DevicePoolsTest, ADeletedPageDoesNotComeBackWithItsHolder) {
  PoolWorker writer(Options("writer"));
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  for (int page = 0; page < 3; ++page) Publish(writer, page);
  const auto pages = KnownPages::Open(*watcher_);
  ASSERT_TRUE(pages.ok()) << pages.status();
  const PageKey key = pages->Key(2);
  const auto deleted = watcher_->Delete(pages->keyspace().id, std::span(&key, 1));
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(*deleted, 1u);
  for (int restart = 0; restart < 2; ++restart) {
    crumbd_.Kill();
    ASSERT_TRUE(crumbd_.Start());
    ASSERT_TRUE(watcher_->WaitConnected(std::chrono::seconds(20)));
    ASSERT_TRUE(Eventually([&] { return Device().pages == 2; }));
    ASSERT_EQ(writer.Do("wait 4"), "ok");
    EXPECT_EQ(writer.Do("check 2"), "right") << "the slot is its own";
    PoolWorker reader(Options("reader"));
    ASSERT_EQ(reader.Do("wait 4"), "ok");
    EXPECT_EQ(reader.Do("acquire 0 3"), "hits 2 device 2 right 2");
    EXPECT_EQ(reader.Stop(), 0);
  }
}

// A crumbd at which the holder never arrived knows of the deletion and is killed. The one after it
// learns of the page from the holder alone.
TEST_F(DevicePoolsTest, APageThatWasDeletedWhileItsHolderWasAwayStaysDeleted) {
  PoolWorker writer(Options("writer"));
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  for (int page = 0; page < 3; ++page) Publish(writer, page);
  ASSERT_EQ(::kill(writer.pid(), SIGSTOP), 0);
  const auto restart = [&] {
    crumbd_.Kill();
    ASSERT_TRUE(crumbd_.Start());
    ASSERT_TRUE(watcher_->WaitConnected(std::chrono::seconds(20)));
  };
  restart();
  const auto pages = KnownPages::Open(*watcher_);
  ASSERT_TRUE(pages.ok()) << pages.status();
  const PageKey key = pages->Key(2);
  const auto deleted = watcher_->Delete(pages->keyspace().id, std::span(&key, 1));
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  restart();
  ASSERT_EQ(::kill(writer.pid(), SIGCONT), 0);
  ASSERT_TRUE(Eventually([&] { return writer.Do("reclaimed") == "3"; }));
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  EXPECT_EQ(writer.Do("check 2"), "right") << "the slot is its own";
  PoolWorker reader(Options("reader"));
  ASSERT_EQ(reader.Do("wait 4"), "ok");
  EXPECT_EQ(reader.Do("acquire 2 3"), "hits 0 device 0 right 0");
}

// The SSD folder is a file system of its own, seen by this test and its children alone.
class FullDiskPoolsTest : public DevicePoolsTest {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(crumbd_.ssd_path());
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", crumbd_.ssd_path().c_str(), "tmpfs", 0, "size=40m") != 0) {
      GTEST_SKIP() << "needs the right to mount, as root has it";
    }
    DevicePoolsTest::SetUp();
  }
  void TearDown() override {
    crumbd_.Kill();
    ::umount2(crumbd_.ssd_path().c_str(), MNT_DETACH);
  }
  std::string Ballast() const { return crumbd_.ssd_path() + "/lost+found"; }
};

TEST_F(FullDiskPoolsTest, CommitsHoldWithoutTheDisk) {
  PoolWorker writer(Options("writer"));
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  Publish(writer, 0);
  std::ofstream file(Ballast(), std::ios::binary);
  const std::vector<char> block(4096);
  while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
  }
  for (int page = 1; page < 4; ++page) Publish(writer, page);
  {
    PoolWorker reader(Options("reader"));
    ASSERT_EQ(reader.Do("wait 4"), "ok");
    EXPECT_EQ(reader.Do("acquire 0 4"), "hits 4 device 4 right 4");
  }
  crumbd_.Kill();
  file.close();
  std::filesystem::remove(Ballast());  // crumbd does not start on a full disk
  ASSERT_TRUE(crumbd_.Start());
  ASSERT_TRUE(watcher_->WaitConnected(std::chrono::seconds(20)));
  ASSERT_TRUE(Eventually([&] { return Device().pages == 4; }));
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  PoolWorker reader(Options("reader"));
  ASSERT_EQ(reader.Do("wait 4"), "ok");
  EXPECT_EQ(reader.Do("acquire 0 4"), "hits 4 device 4 right 4");
}

// Holders of the same slots claim them one after the other, each with headers or without; then the
// first lets go, and the pool is written full.
TEST_F(DevicePoolsTest, SlotsOfSeveralHoldersOutliveTheFirst) {
  constexpr int kHeld = 3;
  for (const char* const second_takes : {"take", "acquire"}) {
    for (const char* const first_takes : {"take", "acquire"}) {
      SCOPED_TRACE(std::string(first_takes) + ", then " + second_takes);
      PoolWorkerOptions reads = Options("reader");
      reads.bytes_max = 0;
      reads.blank_slots = 0;
      PoolWorker first(reads);
      PoolWorker second(reads);
      ASSERT_EQ(first.Do("joined"), "ok");
      ASSERT_EQ(second.Do("joined"), "ok");
      {
        PoolWorker writer(Options("writer"));
        ASSERT_EQ(writer.Do("wait 4"), "ok");
        for (int page = 0; page < kHeld; ++page) Publish(writer, page);
        ASSERT_EQ(first.Do(std::string(first_takes) + " 0 3"), "hits 3 device 3 right 3");
        ASSERT_EQ(second.Do(std::string(second_takes) + " 0 3"), "hits 3 device 3 right 3");
        ASSERT_EQ(writer.Stop(), 0);
      }
      ASSERT_EQ(::kill(second.pid(), SIGSTOP), 0);
      crumbd_.Kill();
      ASSERT_TRUE(crumbd_.Start());
      ASSERT_TRUE(watcher_->WaitConnected(std::chrono::seconds(20)));
      EXPECT_TRUE(Eventually([&] { return first.Do("reclaimed") == "3"; }));
      ASSERT_EQ(::kill(second.pid(), SIGCONT), 0);
      ASSERT_TRUE(Eventually([&] { return second.Do("reclaimed") == "3"; }));
      ASSERT_EQ(first.Do("release"), "ok");
      ASSERT_EQ(first.Stop(), 0);
      PoolWorkerOptions writes = Options("other");
      writes.blank_slots = kSlotsPerHandle;
      PoolWorker other(writes);
      ASSERT_EQ(other.Do("wait " + std::to_string(kSlotsPerHandle - kHeld)), "ok");
      int written = 10;
      while (other.Do("write " + std::to_string(written)) != "none") ++written;
      EXPECT_EQ(written - 10, kSlotsPerHandle - kHeld);
      EXPECT_EQ(second.Do("taken"), "3 of 3");
      ASSERT_EQ(second.Stop(), 0);
      ASSERT_EQ(other.Stop(), 0);
      crumbd_.Kill();  // the next round begins with an empty pool
      ASSERT_TRUE(crumbd_.Start());
      ASSERT_TRUE(watcher_->WaitConnected(std::chrono::seconds(20)));
    }
  }
}

// crumbd knows a process, not its parts: a slot that one of two let go would be free for both.
TEST_F(DevicePoolsTest, AClientTakesPartInAPoolOnce) {
  const auto memory = client::DeviceMemory::OpenHost({.name = "host"});
  const auto other_device = client::DeviceMemory::OpenHost({.name = "other"});
  const client::DevicePoolOptions options = {.slot_bytes = kSlotBytes,
                                             .handle_bytes = 2 << 20,
                                             .bytes_max = 2 << 20,
                                             .range_bytes = uint64_t{1} << 30,
                                             .blank_slots = 4};
  client::DevicePoolOptions other_slots = options;
  other_slots.slot_bytes *= 2;
  for (int round = 0; round < 2; ++round) {  // the second time behind the first ones' end
    auto pool = client::DevicePool::Open(options, *memory, *watcher_);
    ASSERT_TRUE(pool.ok()) << pool.status();
    const auto again = client::DevicePool::Open(options, *memory, *watcher_);
    EXPECT_TRUE(absl::IsFailedPrecondition(again.status())) << again.status();
    EXPECT_TRUE(client::DevicePool::Open(options, *other_device, *watcher_).ok());
    EXPECT_TRUE(client::DevicePool::Open(other_slots, *memory, *watcher_).ok());
    // The one that there is goes on.
    EXPECT_TRUE((*pool)->WaitBlank(4, std::chrono::seconds(60)));
  }
  // Another Client is another process to crumbd.
  auto second = Connect(folder_.path(), "second");
  ASSERT_TRUE(second.ok()) << second.status();
  const auto one = client::DevicePool::Open(options, *memory, *watcher_).value();
  const auto two = client::DevicePool::Open(options, *memory, **second).value();
  EXPECT_TRUE(one->WaitBlank(4, std::chrono::seconds(60)));
  EXPECT_TRUE(two->WaitBlank(4, std::chrono::seconds(60)));
  EXPECT_EQ(one->id(), two->id());
}

TEST_F(DevicePoolsTest, AnUnusedPoolIsGivenUpOnRequest) {
  {
    PoolWorker worker(Options("worker"));
    ASSERT_EQ(worker.Do("wait 4"), "ok");
    Publish(worker, 0);
    const auto memory = client::DeviceMemory::OpenHost({.name = "host"});
    EXPECT_EQ(watcher_->pools()->Reclaim(memory->uuid(), 1).value(), 0u);  // in use
  }
  const auto memory = client::DeviceMemory::OpenHost({.name = "host"});
  const auto other = client::DeviceMemory::OpenHost({.name = "other"});
  EXPECT_EQ(watcher_->pools()->Reclaim(other->uuid(), 1).value(), 0u);
  EXPECT_EQ(Device().capacity_bytes, kSlotsPerHandle * kSlotBytes);
  EXPECT_TRUE(Eventually(
      [&] { return watcher_->pools()->Reclaim(memory->uuid(), 1).value_or(0) == 2 << 20; }));
  EXPECT_EQ(Device().capacity_bytes, 0u);
  EXPECT_EQ(Device().pages, 0u);
}

TEST_F(DevicePoolsTest, NothingIsLeftOfWorkersThatCameAndWent) {
  const auto fds_of_crumbd = [&] {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/" + std::to_string(crumbd_.pid()) + "/fd")) {
      ++count;
    }
    return count;
  };
  size_t after_first = 0;
  for (int round = 0; round < FaultRounds(4); ++round) {
    {
      PoolWorker worker(Options("worker"));
      ASSERT_EQ(worker.Do("wait 4"), "ok");
      ASSERT_NO_FATAL_FAILURE(Write(worker, 1));
      if (round % 2 == 1) {
        EXPECT_EQ(worker.Stop(), 0);
      }
    }
    ASSERT_TRUE(Eventually([&] {
      const auto stats = watcher_->Stats();
      return stats.ok() && stats->sessions == 1 && Device().resident_bytes == 0;
    }));
    // The pool stays, with its handle and its roster.
    if (round == 0) after_first = fds_of_crumbd();
    EXPECT_TRUE(Eventually([&] { return fds_of_crumbd() <= after_first; })) << "round " << round;
  }
}

// With tenants.shared_memory own: slabs come one by one, over the session's socket, while pools are
// talked about on another. The watcher is the administrator.
class TenantPoolsTest : public DevicePoolsTest {
 protected:
  TenantPoolsTest() : DevicePoolsTest(&TenantPoolsTest::Sizes) {}

  PoolWorkerOptions OptionsOf(const std::string& tenant, const std::string& name) const {
    PoolWorkerOptions options = Options(name);
    options.token = TokenOf(tenant);
    return options;
  }

 private:
  static StoreSizes Sizes(const std::string& folder) {
    StoreSizes sizes;
    sizes.slab_bytes = uint64_t{4} << 20;
    sizes.more = TenantsWithOwnSlabs(folder, {"one", "two"});
    return sizes;
  }
};

TEST_F(TenantPoolsTest, EachTenantHasAPool) {
  PoolWorker writer(OptionsOf("one", "writer"));
  PoolWorker reader(OptionsOf("one", "reader"));
  PoolWorker other(OptionsOf("two", "other"));
  for (PoolWorker* worker : {&writer, &reader, &other}) ASSERT_EQ(worker->Do("wait 4"), "ok");
  for (int page = 0; page < 6; ++page) Publish(writer, page);
  EXPECT_EQ(reader.Do("acquire 0 6"), "hits 6 device 6 right 6");
  EXPECT_EQ(other.Do("acquire 0 6"), "hits 0 device 0 right 0");
  Publish(other, 0);  // the same page, and not a copy of the other tenant's
  EXPECT_EQ(Device().pages, 7u);
  EXPECT_EQ(Device().capacity_bytes, 2 * kSlotsPerHandle * kSlotBytes);
  EXPECT_EQ(other.Do("acquire 0 1"), "hits 1 device 1 right 1");
}

TEST_F(TenantPoolsTest, PagesMoveDownToSlabsThatComeOneByOne) {
  constexpr int kPages = 2 * kSlotsPerHandle;
  PoolWorker worker(OptionsOf("one", "worker"));
  PoolWorker reader(OptionsOf("one", "reader"));
  ASSERT_EQ(worker.Do("wait 4"), "ok");
  for (int page = 0; page < kPages; ++page) {
    Publish(worker, page);
    ASSERT_EQ(worker.Do("free " + std::to_string(page)), "ok");
  }
  EXPECT_GT(Counter("crumb_device_demoted_slots_total"), 0u);
  const std::string hits = "hits " + std::to_string(kPages) + " device ";
  const std::string all = "acquire 0 " + std::to_string(kPages);
  for (PoolWorker* each : {&worker, &reader}) {
    const std::string response = each->Do(all);
    EXPECT_EQ(response.substr(0, hits.size()), hits) << response;
    EXPECT_EQ(each->Do("release"), "ok");
  }
}

TEST_F(TenantPoolsTest, WorkersGiveTheirPoolToTheNextCrumbd) {
  PoolWorker writer(OptionsOf("one", "writer"));
  ASSERT_EQ(writer.Do("wait 4"), "ok");
  for (int page = 0; page < 6; ++page) Publish(writer, page);
  crumbd_.Kill();
  ASSERT_TRUE(crumbd_.Start());
  ASSERT_TRUE(Eventually([&] { return writer.Do("reclaimed") == "6" && Device().pages == 6; }));
  PoolWorker fresh(OptionsOf("one", "fresh"));
  ASSERT_EQ(fresh.Do("wait 4"), "ok");
  EXPECT_EQ(fresh.Do("acquire 0 6"), "hits 6 device 6 right 6");
}

// crumbd's response with slots is lost, and the connection with it: the process has another one
// soon, and others are given those slots while it lives.
TEST_F(DevicePoolsTest, SlotsOfALostResponseAreFreeForOthers) {
  const TemporaryFolder before_it;
  std::filesystem::create_symlink(folder_.path() + "/crumbd.fd.sock",
                                  before_it.path() + "/crumbd.fd.sock");
  SocketProxy proxy(before_it.path() + "/crumbd.sock", folder_.path() + "/crumbd.sock");
  const auto memory = client::DeviceMemory::OpenHost({.name = "lost-responses"});
  const auto open_pool = [&](client::Client& client) {
    return client::DevicePool::Open({.slot_bytes = kSlotBytes,
                                     .handle_bytes = 2 << 20,
                                     .bytes_max = 2 << 20,
                                     .range_bytes = uint64_t{1} << 30,
                                     .blank_slots = 2},
                                    *memory, client)
        .value();
  };
  client::ClientOptions options;
  options.socket_dir = before_it.path();
  options.backoff_min = std::chrono::milliseconds(5);
  options.backoff_max = std::chrono::milliseconds(50);
  const auto client = client::Client::Open(options).value();
  ASSERT_TRUE(client->WaitConnected(std::chrono::seconds(20)));
  const auto pool = open_pool(*client);
  ASSERT_TRUE(pool->WaitBlank(2, std::chrono::seconds(60)));
  const auto used = pool->TakeBlank();
  ASSERT_NE(used, nullptr);
  ASSERT_TRUE(pool->WaitBlank(1, std::chrono::seconds(60)));
  proxy.SwallowResponses();
  // crumbd grants the slots: those missing afterwards are these.
  pool->Reserve(kSlotsPerHandle / 2, std::chrono::seconds(2));
  const auto other_client = Connect(folder_.path(), "other").value();
  const auto other = open_pool(*other_client);
  ASSERT_TRUE(other->WaitBlank(1, std::chrono::seconds(60)));
  EXPECT_LT(other->Reserve(kSlotsPerHandle, std::chrono::seconds(20)).size(),
            static_cast<size_t>(kSlotsPerHandle / 2 + 4));
  proxy.Cut();
  // All but the one in use and the blank ones of the first pool.
  EXPECT_TRUE(Eventually([&] {
    return other->Reserve(kSlotsPerHandle, std::chrono::seconds(20)).size() >=
           static_cast<size_t>(kSlotsPerHandle - 5);
  }));
  EXPECT_NE(pool->id(), client::PoolId());
  EXPECT_EQ(pool->stats().held_slots, 1u);
}

}  // namespace
}  // namespace crumb::fault

int main(int argc, char** argv) {
  const int worker = crumb::fault::RunPoolWorker(argc, argv);
  if (worker >= 0) return worker;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
