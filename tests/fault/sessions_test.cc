// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Ten thousand sessions are opened and dropped, some in the middle of their opening or of joining a
// device pool. crumbd and this process have the resources of before then: descriptors, mappings,
// pinned memory; crumbd also memory, sessions, leases, slots.

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "client/gpu/device/device_memory.h"
#include "client/gpu/pools/device_pool.h"
#include "common/fd_channel.h"
#include "crumb/v1/session.pb.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"

namespace crumb::fault {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int kSessions = 10'000;
constexpr int kWarmUp = 500;
constexpr int kLeasing = 40;
constexpr uint64_t kSlotBytes = 64 << 10;
constexpr uint64_t kHandleBytes = 2 * kMiB;
// Freed memory that an allocator may keep.
constexpr uint64_t kMemorySlack = 16 * kMiB;
constexpr size_t kMappingsSlack = 16;

struct Held {
  size_t descriptors = 0;
  size_t mappings = 0;
  size_t shared_mappings = 0;  // mappings of memory files
  uint64_t resident_bytes = 0;
  uint64_t pinned_bytes = 0;
};

Held HeldBy(pid_t pid) {
  const std::string proc = "/proc/" + std::to_string(pid);
  Held held;
  std::error_code error;
  std::filesystem::directory_iterator fds(proc + "/fd", error);
  held.descriptors = static_cast<size_t>(std::distance(begin(fds), end(fds)));
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    ++held.mappings;
    if (line.find("/memfd:") != std::string::npos) ++held.shared_mappings;
  }
  std::ifstream status(proc + "/status");
  for (std::string line; std::getline(status, line);) {
    // Private memory only: slabs stay the same, and staging is charged to its writer.
    if (line.starts_with("RssAnon:")) held.resident_bytes = std::stoull(line.substr(8)) * 1024;
    if (line.starts_with("VmPin:") || line.starts_with("VmLck:")) {
      held.pinned_bytes += std::stoull(line.substr(6)) * 1024;
    }
  }
  return held;
}

client::DeviceMemory& Memory() {
  static const auto memory = client::DeviceMemory::OpenHost({.name = "sessions"});
  return *memory;
}

// Takes part in the pool of whole clients below, by itself.
void JoinPool(int socket, bool waits) {
  v1::PoolRequest request;
  request.mutable_join()->set_device(Memory().uuid().ToBytes());
  request.mutable_join()->set_slot_bytes(kSlotBytes);
  request.mutable_join()->set_handle_bytes(kHandleBytes);
  ASSERT_TRUE(SendFdMessage(socket, request.SerializeAsString(), {}).ok());
  if (!waits) return;
  const auto response = ReceiveFdMessage(socket);
  ASSERT_TRUE(response.ok()) << response.status();
  v1::PoolResponse joined;
  ASSERT_TRUE(joined.ParseFromString(response->bytes));
  EXPECT_EQ(joined.code(), 0u) << joined.error();
  EXPECT_TRUE(joined.roster());
}

// Sends messages that crumbd refuses, with descriptors, of which crumbd must keep none.
void TalkNonsense(int socket, bool parses) {
  v1::PoolRequest request;  // about a pool that the session is not in
  request.mutable_offer()->set_pool(std::string(16, '?'));
  const std::string bytes = parses ? request.SerializeAsString() : std::string(64, '\xff');
  const int fds[] = {socket, socket, socket};
  ASSERT_TRUE(SendFdMessage(socket, bytes, fds).ok());
}

// One session in one of the ways in which processes come and go.
void OpenAndDrop(const std::string& socket_dir, int number) {
  const auto socket = ConnectFdChannel(socket_dir + "/crumbd.fd.sock");
  ASSERT_TRUE(socket.ok()) << socket.status();
  if (number % 10 == 0) return;  // says nothing
  v1::SessionHello hello;
  hello.set_protocol_version(number % 10 == 1 ? 99 : 1);
  hello.set_process_name("passer-by");
  hello.set_staging_bytes(256 << 10);
  const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  const int fds[] = {pidfd.get()};
  // A hello without its pidfd is refused, too.
  const auto passed = std::span<const int>(fds).first(number % 10 == 2 ? 0 : 1);
  ASSERT_TRUE(SendFdMessage(socket->get(), hello.SerializeAsString(), passed).ok());
  if (number % 10 == 3) return;  // does not wait for the response
  const auto response = ReceiveFdMessage(socket->get());
  ASSERT_TRUE(response.ok()) << response.status();
  v1::SessionWelcome welcome;
  ASSERT_TRUE(welcome.ParseFromString(response->bytes));
  EXPECT_EQ(welcome.error().empty(), number % 10 > 2) << welcome.error();
  if (number % 10 == 4 || number % 10 == 5) {
    ASSERT_NO_FATAL_FAILURE(JoinPool(socket->get(), /*waits=*/number % 10 == 4));
  }
  if (number % 10 == 6 || number % 10 == 7) {
    ASSERT_NO_FATAL_FAILURE(TalkNonsense(socket->get(), /*parses=*/number % 10 == 6));
  }
}

TEST(SessionsTest, TenThousandLeaveNothingBehind) {
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), {.slab_bytes = 16 * kMiB, .ssd_bytes = 0});
  ASSERT_TRUE(crumbd.Start());
  auto watcher = Connect(folder.path(), "watcher");
  ASSERT_TRUE(watcher.ok()) << watcher.status();
  const auto pages = KnownPages::Open(**watcher);
  ASSERT_TRUE(pages.ok()) << pages.status();
  ASSERT_TRUE(pages->Publish(**watcher, 0, 8).ok());
  const auto quiet = [&] {
    const auto stats = (*watcher)->Stats();
    if (!stats.ok()) return false;
    uint64_t slots = 0;  // slots of the device pool that have a holder
    for (const auto& tier : stats->tiers) {
      if (tier.tier == client::Tier::kDevice) slots += tier.resident_bytes;
    }
    return stats->sessions == 1 && stats->leases == 0 && stats->reservations == 0 && slots == 0;
  };
  const auto visit = [&](int first, int last) {
    for (int number = first; number < last; ++number) {
      ASSERT_NO_FATAL_FAILURE(OpenAndDrop(folder.path(), number));
      if (number % (kSessions / kLeasing) != 0) continue;
      // A whole client, which goes with a lease and staging room in its hands.
      auto client = Connect(folder.path(), "leaver");
      ASSERT_TRUE(client.ok()) << client.status();
      EXPECT_TRUE(pages->ReadBack(**client, 3, std::chrono::seconds(10)).ok());
      const auto room = (*client)->Reserve(2, pages->fragment_bytes(), std::chrono::seconds(10));
      EXPECT_TRUE(room.ok()) << room.status();
      auto pool = client::DevicePool::Open({.slot_bytes = kSlotBytes,
                                            .handle_bytes = kHandleBytes,
                                            .bytes_max = kHandleBytes,
                                            .range_bytes = 4 * kHandleBytes,
                                            .blank_slots = 4},
                                           Memory(), **client);
      ASSERT_TRUE(pool.ok()) << pool.status();
      EXPECT_TRUE((*pool)->WaitBlank(4, std::chrono::seconds(60)));
      EXPECT_NE((*pool)->TakeBlank(), nullptr);
    }
  };
  ASSERT_NO_FATAL_FAILURE(visit(0, kWarmUp));
  ASSERT_TRUE(Eventually(quiet));
  const Held before = HeldBy(crumbd.pid());
  const Held own_before = HeldBy(::getpid());
  const auto began = std::chrono::steady_clock::now();
  ASSERT_NO_FATAL_FAILURE(visit(kWarmUp, kWarmUp + kSessions));
  std::cout << kSessions << " sessions in "
            << std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count()
            << " s\n";
  ASSERT_TRUE(Eventually(quiet));
  EXPECT_TRUE(Eventually([&] { return HeldBy(crumbd.pid()).descriptors <= before.descriptors; }))
      << HeldBy(crumbd.pid()).descriptors << " descriptors, before " << before.descriptors;
  EXPECT_TRUE(Eventually([&] {
    return HeldBy(crumbd.pid()).mappings <= before.mappings + kMappingsSlack;
  })) << HeldBy(crumbd.pid()).mappings
      << " mappings, before " << before.mappings;
  EXPECT_TRUE(Eventually([&] { return HeldBy(::getpid()).descriptors <= own_before.descriptors; }))
      << HeldBy(::getpid()).descriptors << " descriptors here, before " << own_before.descriptors;
  EXPECT_LE(HeldBy(::getpid()).shared_mappings, own_before.shared_mappings);
  EXPECT_EQ(HeldBy(::getpid()).pinned_bytes, own_before.pinned_bytes);
  const Held after = HeldBy(crumbd.pid());
  EXPECT_EQ(after.pinned_bytes, before.pinned_bytes);
  EXPECT_LE(after.resident_bytes, before.resident_bytes + kMemorySlack);
  std::cout << "descriptors " << before.descriptors << " -> " << after.descriptors << ", mappings "
            << before.mappings << " -> " << after.mappings << ", memory of its own "
            << before.resident_bytes << " -> " << after.resident_bytes << "\n";
  EXPECT_TRUE(pages->ReadBack(**watcher, 3, std::chrono::seconds(10)).value());
  EXPECT_EQ(crumbd.Stop(), 0);
}

}  // namespace
}  // namespace crumb::fault
