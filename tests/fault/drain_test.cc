// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The acknowledgements of a drained node hold after kill -9 of that node, on a disk with room and
// on a full one: the other node serves the pages.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/unique_fd.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"

namespace crumb::fault {
namespace {

using std::chrono::seconds;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kPages = 48;

// Two loopback ports that were free a moment ago.
std::array<std::string, 2> FreeAddresses() {
  std::array<std::string, 2> addresses;
  std::array<UniqueFd, 2> sockets;  // held together, so that they differ
  for (size_t i = 0; i < addresses.size(); ++i) {
    sockets[i].Reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(sockets[i].get(), any, bytes), 0);
    EXPECT_EQ(::getsockname(sockets[i].get(), any, &bytes), 0);
    addresses[i] = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  return addresses;
}

// Nodes 0 and 1 know each other by a static list.
class DrainTest : public testing::Test {
 protected:
  DrainTest() {
    const std::array<std::string, 2> addresses = FreeAddresses();
    const std::string secret = folders_[0].path() + "/secret";
    std::ofstream(secret) << "the secret of a test cluster";
    for (size_t i = 0; i < nodes_.size(); ++i) {
      nodes_[i].emplace(
          folders_[i].path(),
          StoreSizes{.host_bytes = 32 * kMiB,
                     .ssd_bytes = 32 * kMiB,
                     .more = "cluster:\n  secret_file: " + secret + "\n  nodes: [" + addresses[0] +
                             ", " + addresses[1] + "]\n  heartbeat: 50ms\n  node_ttl: 1s\n",
                     .tcp = addresses[i]});
    }
  }

  void StartBoth() {
    for (const size_t i : {0, 1}) ASSERT_TRUE(nodes_[i]->Start());
    for (const size_t i : {0, 1}) Connect(i);
    ASSERT_TRUE(Eventually([&] { return StateOf(0, 1) == "active" && StateOf(1, 0) == "active"; }));
  }
  void Connect(size_t node) {
    auto client = fault::Connect(nodes_[node]->socket_dir(), "drained");
    ASSERT_TRUE(client.ok()) << client.status();
    clients_[node] = *std::move(client);
  }
  // The state of a node as `from` lists it; empty: it does not list it.
  std::string StateOf(size_t from, size_t of) {
    const auto list = clients_[from]->ListNodes();
    if (!list.ok()) return "";
    for (const auto& node : list->nodes) {
      if (node.self == (from == of)) return node.state;
    }
    return "";
  }
  std::string OwnId(size_t node) {
    const auto list = clients_[node]->ListNodes();
    for (const auto& one : list->nodes) {
      if (one.self) return one.id;
    }
    return "";
  }
  void Publish() {
    const auto pages = KnownPages::Open(*clients_[0]);
    ASSERT_TRUE(pages.ok()) << pages.status();
    for (uint64_t number = 0; number < kPages; number += 8) {
      const auto outcomes = pages->Publish(*clients_[0], number, 8);
      ASSERT_TRUE(outcomes.ok()) << outcomes.status();
      for (const auto outcome : *outcomes) ASSERT_EQ(outcome, client::CommitOutcome::kStored);
    }
    ASSERT_TRUE(clients_[0]->Flush(seconds(30)).ok());
  }
  void Drain() {
    ASSERT_TRUE(clients_[0]->DrainNode(OwnId(0)).ok());
    ASSERT_TRUE(Eventually([&] { return StateOf(0, 0) == "drained"; }));
  }
  uint64_t CountThere(size_t node) {
    const auto pages = KnownPages::Open(*clients_[node]);
    EXPECT_TRUE(pages.ok()) << pages.status();
    uint64_t there = 0;
    for (uint64_t number = 0; number < kPages; ++number) {
      const auto right = pages->ReadBack(*clients_[node], number, seconds(5));
      EXPECT_FALSE(absl::IsDataLoss(right.status())) << right.status();
      there += right.ok() && *right ? 1 : 0;
    }
    return there;
  }
  // The drained node dies: the other one has its pages, and a restart makes it active again.
  void ExpectPagesOutliveTheDrainedNode() {
    nodes_[0]->Kill();
    EXPECT_EQ(CountThere(1), kPages);
    ASSERT_TRUE(nodes_[0]->Start());
    Connect(0);
    EXPECT_TRUE(Eventually([&] { return StateOf(0, 0) == "active"; }));
  }

  std::array<TemporaryFolder, 2> folders_;
  std::array<std::optional<CrumbdProcess>, 2> nodes_;
  std::array<std::unique_ptr<client::Client>, 2> clients_;
};

TEST_F(DrainTest, PagesOfADrainedNodeOutliveIt) {
  StartBoth();
  Publish();
  Drain();
  ExpectPagesOutliveTheDrainedNode();
}

TEST_F(DrainTest, ANodeThatDiesWhileItDrainsKeepsItsPages) {
  StartBoth();
  Publish();
  ASSERT_TRUE(clients_[0]->DrainNode(OwnId(0)).ok());
  nodes_[0]->Kill();
  ASSERT_TRUE(nodes_[0]->Start());
  Connect(0);
  EXPECT_TRUE(Eventually([&] { return CountThere(0) == kPages; }));
  EXPECT_EQ(StateOf(0, 0), "active");
}

// The SSD folder of node 0 is a file system of its own, seen by this test and its children alone.
TEST_F(DrainTest, ANodeWithAFullDiskCanBeDrained) {
  std::filesystem::create_directories(nodes_[0]->ssd_path());
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", nodes_[0]->ssd_path().c_str(), "tmpfs", 0, "size=40m") != 0) {
    GTEST_SKIP() << "needs the right to mount, as root has it";
  }
  StartBoth();
  Publish();
  const std::string ballast = nodes_[0]->ssd_path() + "/lost+found";
  {
    std::ofstream file(ballast, std::ios::binary);
    const std::vector<char> block(4096);
    while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  Drain();
  std::filesystem::remove(ballast);  // crumbd does not start on a full disk
  ExpectPagesOutliveTheDrainedNode();
  nodes_[0]->Kill();
  ::umount2(nodes_[0]->ssd_path().c_str(), MNT_DETACH);
}

}  // namespace
}  // namespace crumb::fault
