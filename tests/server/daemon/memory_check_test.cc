// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/memory_check.h"

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

class MemoryCheckTest : public testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path full = folder_.path() + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  MemoryFacts Read() const { return ReadMemoryFacts(folder_.path()); }

  TemporaryFolder folder_;
};

storage::HostOptions HostOf(uint64_t bytes, bool huge_pages = false) {
  storage::HostOptions options;
  options.bytes_max = ByteSize{bytes};
  options.huge_pages = huge_pages;
  return options;
}

TEST_F(MemoryCheckTest, ReadsMeminfo) {
  Write("/proc/meminfo", "MemTotal:  100 kB\nMemAvailable:   2048 kB\nHugePages_Free:     7\n");
  EXPECT_EQ(Read().available_bytes, 2 * kMiB);
  EXPECT_EQ(Read().huge_pages_free, 7u);
  EXPECT_EQ(Read().limit_bytes, std::nullopt);
}

TEST_F(MemoryCheckTest, TakesTheLowestLimitOnTheWayUp) {
  Write("/proc/self/cgroup", "0::/pods/one/crumbd\n");
  Write("/sys/fs/cgroup/pods/one/crumbd/memory.max", "max\n");
  Write("/sys/fs/cgroup/pods/one/memory.max", "1048576\n");
  Write("/sys/fs/cgroup/pods/memory.max", "4194304\n");
  EXPECT_EQ(Read().limit_bytes, kMiB);
  EXPECT_THAT(Read().limit_file, HasSubstr("/pods/one/memory.max"));
}

TEST_F(MemoryCheckTest, ReadsANamespacesRootAndVersionOne) {
  Write("/proc/self/cgroup", "4:cpu,memory:/docker/x\n3:cpuset:/\n0::/\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Read().limit_bytes, std::nullopt);
  Write("/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "8388608\n");
  EXPECT_EQ(Read().limit_bytes, 8 * kMiB);
  Write("/sys/fs/cgroup/memory.max", "4194304\n");
  EXPECT_EQ(Read().limit_bytes, 4 * kMiB);
}

TEST_F(MemoryCheckTest, RoomIsWhatTheFullestLimitLeavesBesidesFileCache) {
  Write("/proc/self/cgroup", "0::/pod/crumbd\n");
  Write("/sys/fs/cgroup/pod/memory.max", "1000000\n");
  Write("/sys/fs/cgroup/pod/memory.current", "900000\n");
  Write("/sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 20000\nactive_file 3000\n");
  Write("/sys/fs/cgroup/pod/crumbd/memory.max", "700000\n");
  Write("/sys/fs/cgroup/pod/crumbd/memory.current", "100000\n");
  EXPECT_EQ(Read().limit_bytes, 700000u);
  EXPECT_EQ(Read().limit_room_bytes, 123000u);
  Write("/sys/fs/cgroup/pod/crumbd/memory.current", "800000\n");  // the limit was lowered
  EXPECT_EQ(Read().limit_room_bytes, 0u);
}

TEST_F(MemoryCheckTest, ReadsTheRoomOfVersionOne) {
  Write("/proc/self/cgroup", "4:memory:/x\n");
  Write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1000000\n");
  Write("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "600000\n");
  Write("/sys/fs/cgroup/memory/x/memory.stat", "inactive_file 9\ntotal_inactive_file 50000\n");
  EXPECT_EQ(Read().limit_room_bytes, 450000u);
}

TEST_F(MemoryCheckTest, NonsenseIsNoLimit) {
  Write("/proc/meminfo", "MemAvailable\n:\nMemAvailable: much\n\n");
  Write("/proc/self/cgroup", "\n:\n::\n0::\nnothing\n4:memory:relative\n");
  Write("/sys/fs/cgroup/memory.max", "");
  EXPECT_EQ(Read().limit_bytes, std::nullopt);
  EXPECT_EQ(Read().available_bytes, std::nullopt);
}

TEST(CheckMemoryTest, RefusesWhatTheLimitOrTheMachineCannotHold) {
  MemoryFacts facts;
  facts.limit_bytes = 1024 * kMiB;
  facts.limit_file = "/sys/fs/cgroup/memory.max";
  const auto refused = CheckMemory(HostOf(1024 * kMiB), facts);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("store.host.bytes_max is 1GiB and 64MiB more are needed, but "
                        "/sys/fs/cgroup/memory.max allows 1GiB: raise that limit or lower"));
  EXPECT_TRUE(CheckMemory(HostOf(960 * kMiB), facts).ok());
  facts.total_bytes = 512 * kMiB;
  EXPECT_THAT(std::string(CheckMemory(HostOf(960 * kMiB), facts).status().message()),
              HasSubstr("the machine has 512MiB of memory"));
}

TEST(CheckMemoryTest, WhatOthersUseNowIsTakenLater) {
  MemoryFacts facts;
  EXPECT_EQ(MemoryRoom(facts), UINT64_MAX);
  facts.limit_bytes = 1024 * kMiB;
  facts.limit_room_bytes = 320 * kMiB;
  facts.total_bytes = 2048 * kMiB;
  facts.available_bytes = 512 * kMiB;
  EXPECT_EQ(MemoryRoom(facts), 256 * kMiB);
  const auto lines = CheckMemory(HostOf(512 * kMiB), facts);
  ASSERT_TRUE(lines.ok()) << lines.status();
  EXPECT_THAT((*lines)[1], HasSubstr("256MiB of it can be had now"));
  facts.available_bytes = 32 * kMiB;
  EXPECT_EQ(MemoryRoom(facts), 0u);
}

TEST(CheckMemoryTest, SaysWhatItNeedsOfHugePagesAndLockedMemory) {
  MemoryFacts facts;
  facts.limit_bytes = 128 * kMiB;  // huge pages are not charged to it
  facts.huge_pages_free = 512;
  facts.locked_bytes = 8 * kMiB;
  EXPECT_THAT(
      CheckMemory(HostOf(1024 * kMiB, true), facts).value(),
      ElementsAre("memory: the host tier takes 1GiB before crumbd is ready; available unlimited, "
                  "limit 128MiB",
                  "huge pages: 512 of 2 MiB are needed, 512 are free",
                  "locked memory: crumbd locks none itself; the limit is 8MiB, RDMA transports "
                  "need it unlimited"));
  facts.huge_pages_free = 511;
  EXPECT_EQ(CheckMemory(HostOf(1024 * kMiB, true), facts).status().code(),
            absl::StatusCode::kResourceExhausted);
  facts.limit_bytes = std::nullopt;
  EXPECT_THAT(CheckMemory(HostOf(1024 * kMiB, true), facts).value()[1],
              HasSubstr("511 are free; reserve them (sysctl vm.nr_hugepages)"));
}

TEST(CheckMemoryTest, TheDefaultsFitThisMachine) {
  EXPECT_TRUE(CheckMemory(HostOf(16 * kMiB), ReadMemoryFacts("")).ok());
}

}  // namespace
}  // namespace crumb::server
