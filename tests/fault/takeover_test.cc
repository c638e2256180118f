// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// One crumbd takes over from another while clients read and write. No page is lost, no wrong byte
// is served; and when either is killed meanwhile, the other one serves.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"
#include "tests/fault/tenants.h"

namespace crumb::fault {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr StoreSizes kSizes = {
    .host_bytes = 64 * kMiB, .slab_bytes = 8 * kMiB, .ssd_bytes = 256 * kMiB};
constexpr uint64_t kPages = 640;  // three quarters of it

// The exit code of a process that ends by itself; -1: a signal ended it, -2: it does not end.
int WaitEnd(pid_t pid) {
  int status = 0;
  if (!Eventually([&] { return ::waitpid(pid, &status, WNOHANG) == pid; })) return -2;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string LogOf(const CrumbdProcess& crumbd) {
  std::stringstream text;
  text << std::ifstream(crumbd.socket_dir() + "/crumbd.log").rdbuf();
  return text.str();
}

// Publishes missing pages until all are there: a busy machine may refuse some.
bool Fill(client::Client& client, uint64_t count = kPages) {
  const auto pages = KnownPages::Open(client);
  if (!pages.ok()) return false;
  uint64_t next = 0;
  return Eventually([&] {
    while (next < count) {
      const auto outcomes = pages->Publish(client, next, 8);
      if (!outcomes.ok()) return false;
      for (const client::CommitOutcome outcome : *outcomes) {
        const bool there = outcome == client::CommitOutcome::kStored ||
                           outcome == client::CommitOutcome::kDeduplicated;
        if (!there) return false;
        ++next;
      }
    }
    return true;
  });
}

struct Found {
  uint64_t right = 0;
  uint64_t missing = 0;
  uint64_t wrong = 0;
};

// Returns the pages that crumbd serves. A call that fails finds none: on a busy machine a client
// learns late that its connection was another crumbd's, and repeats its call.
Found ReadAll(client::Client& client, uint64_t count = kPages) {
  Found found;
  absl::StatusOr<KnownPages> pages = absl::UnknownError("");
  EXPECT_TRUE(Eventually([&] { return (pages = KnownPages::Open(client)).ok(); }))
      << pages.status();
  if (!pages.ok()) return found;
  for (uint64_t number = 0; number < count; ++number) {
    absl::StatusOr<bool> right = false;
    const auto completed = [&] {
      right = pages->ReadBack(client, number, seconds(10));
      return right.ok() || absl::IsDataLoss(right.status());
    };
    EXPECT_TRUE(Eventually(completed)) << right.status();
    if (absl::IsDataLoss(right.status())) {
      ++found.wrong;
    } else if (right.ok() && *right) {
      ++found.right;
    } else {
      ++found.missing;
    }
  }
  return found;
}

// Reads known pages and writes new ones for as long as it lives, over every crumbd there is.
class Load {
 public:
  explicit Load(const std::string& socket_dir) {
    reader_ = std::thread([this, socket_dir] {
      std::mt19937_64 random(7);
      Run(socket_dir, "reader", [&](client::Client& client, const KnownPages& pages) {
        const auto right = pages.ReadBack(client, random() % kPages, milliseconds(200));
        if (absl::IsDataLoss(right.status())) ++wrong_;
        if (right.ok() && *right) ++hits_;
      });
    });
    writer_ = std::thread([this, socket_dir] {
      uint64_t next = 1 << 20;
      Run(socket_dir, "writer", [&](client::Client& client, const KnownPages& pages) {
        // Few and the same again, so that they push nothing out.
        if (pages.Publish(client, next, 2).ok()) next = (1 << 20) + (next + 2) % 32;
        std::this_thread::sleep_for(milliseconds(2));
      });
    });
  }
  ~Load() { Stop(); }
  void Stop() {
    stop_ = true;
    if (reader_.joinable()) reader_.join();
    if (writer_.joinable()) writer_.join();
  }
  uint64_t hits() const { return hits_; }
  uint64_t wrong() const { return wrong_; }

 private:
  template <typename Body>
  void Run(const std::string& socket_dir, const std::string& name, const Body& body) {
    const auto client = Connect(socket_dir, name);
    if (!client.ok()) return;
    while (!stop_) {
      const auto pages = KnownPages::Open(**client);
      if (pages.ok()) {
        body(**client, *pages);
      } else {
        std::this_thread::sleep_for(milliseconds(2));
      }
    }
  }

  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> hits_{0};
  std::atomic<uint64_t> wrong_{0};
  std::thread reader_;
  std::thread writer_;
};

// Takes over once; the former process has ended well.
void TakeOver(CrumbdProcess& crumbd) {
  const pid_t before = crumbd.pid();
  const pid_t successor = crumbd.StartSuccessor();
  ASSERT_GT(successor, 0);
  ASSERT_EQ(WaitEnd(before), 0) << LogOf(crumbd);
  crumbd.Follow(successor);
  ASSERT_TRUE(crumbd.WaitServing()) << LogOf(crumbd);
}

TEST(TakeoverTest, NoPageIsLostAndLiveLeasesStayRight) {
  TemporaryFolder folder;
  StoreSizes sizes = kSizes;
  sizes.ssd_bytes = 0;  // hits can only come from memory
  CrumbdProcess crumbd(folder.path(), sizes);
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "watcher");
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(Fill(**client));
  const auto pages = KnownPages::Open(**client);
  ASSERT_TRUE(pages.ok());
  // A worker that is in the middle of something.
  const PageKey key = pages->Key(5);
  client::AcquireRequest request;
  request.keyspace = pages->keyspace().id;
  request.generation = pages->keyspace().generation;
  request.keys = std::span(&key, 1);
  const auto held = (*client)->Acquire(request);
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_EQ(held->hit_pages, 1u);

  Load load(folder.path());
  for (int round = 0; round < FaultRounds(3); ++round) {
    ASSERT_NO_FATAL_FAILURE(TakeOver(crumbd));
    ASSERT_TRUE((*client)->WaitConnected(seconds(30)));
    const Found found = ReadAll(**client);
    EXPECT_EQ(found.right, kPages) << "round " << round << LogOf(crumbd);
    EXPECT_EQ(found.wrong, 0u);
    const auto expected = pages->Fragment(5);
    const auto fragments = held->lease->fragments();
    ASSERT_EQ(fragments.size(), 1u);
    EXPECT_TRUE(std::equal(fragments[0].tiles.begin(), fragments[0].tiles.end(), expected.begin()))
        << "memory of an old lease was used again";
    const uint64_t hits = load.hits();
    EXPECT_TRUE(Eventually([&] { return load.hits() > hits + 20; })) << "readers do not hit again";
    // Pages have moved, and the successor can write everywhere.
    EXPECT_TRUE(Eventually([&] {
      return LogOf(crumbd).find("host memory is there in full") != std::string::npos &&
             HostCapacity(**client) == sizes.host_bytes;
    })) << LogOf(crumbd);
    EXPECT_EQ(ReadAll(**client).right, kPages);
  }
  load.Stop();
  EXPECT_EQ(load.wrong(), 0u);
  EXPECT_EQ(crumbd.Stop(), 0);
}

// Each tenant's pages stay where they are, in slabs that only its processes are given.
TEST(TakeoverTest, TenantsWithSlabsOfTheirOwnLoseNoPage) {
  constexpr uint64_t kPagesEach = 250;
  const std::vector<std::string> tenants = {"one", "two"};
  TemporaryFolder folder;
  StoreSizes sizes = kSizes;
  sizes.ssd_bytes = 0;
  sizes.more = TenantsWithOwnSlabs(folder.path(), tenants);
  CrumbdProcess crumbd(folder.path(), sizes);
  ASSERT_TRUE(crumbd.Start());
  std::vector<std::unique_ptr<client::Client>> clients;
  for (const std::string& tenant : tenants) {
    client::ClientOptions options;
    options.socket_dir = folder.path();
    options.process_name = tenant;
    options.token = TokenOf(tenant);
    auto client = client::Client::Open(options);
    ASSERT_TRUE(client.ok()) << client.status();
    clients.push_back(*std::move(client));
    ASSERT_TRUE(Fill(*clients.back(), kPagesEach));
  }
  for (int round = 0; round < FaultRounds(2); ++round) {
    ASSERT_NO_FATAL_FAILURE(TakeOver(crumbd));
    for (const auto& client : clients) {
      ASSERT_TRUE(client->WaitConnected(seconds(30)));
      const Found found = ReadAll(*client, kPagesEach);
      EXPECT_EQ(found.right, kPagesEach) << "round " << round << LogOf(crumbd);
      EXPECT_EQ(found.wrong, 0u);
    }
    // Pages have moved to slabs of the successor's.
    EXPECT_TRUE(Eventually([&] { return HostCapacity(*clients[0]) == sizes.host_bytes; }))
        << LogOf(crumbd);
    for (const auto& client : clients) EXPECT_EQ(ReadAll(*client, kPagesEach).right, kPagesEach);
  }
  EXPECT_EQ(crumbd.Stop(), 0);
}

// Kills one of the two at a moment of the take-over. The other one serves, alone, and right.
void KillOneOfTwo(bool kill_successor) {
  const int rounds = FaultRounds(4);
  const unsigned seed = std::random_device()();
  std::cout << "seed " << seed << std::endl;
  std::mt19937 random(seed);
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), kSizes);
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "watcher");
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(Fill(**client));
  ASSERT_TRUE((*client)->Flush(seconds(30)).ok());
  Load load(folder.path());
  for (int round = 0; round < rounds; ++round) {
    const pid_t before = crumbd.pid();
    const pid_t successor = crumbd.StartSuccessor();
    ASSERT_GT(successor, 0);
    std::this_thread::sleep_for(milliseconds(random() % 250));
    const pid_t victim = kill_successor ? successor : before;
    ::kill(victim, SIGKILL);
    const int victim_code = WaitEnd(victim);
    ASSERT_NE(victim_code, -2);
    const pid_t other = kill_successor ? before : successor;
    // The one that is left serves, unless the killed one was done and the other had ended.
    const bool none_left = kill_successor && ::waitpid(before, nullptr, WNOHANG) == before;
    if (none_left) {
      std::cout << "round " << round << ": the predecessor had ended" << std::endl;
      crumbd.Follow(-1);
      ASSERT_TRUE(crumbd.Start()) << LogOf(crumbd);
    } else {
      crumbd.Follow(other);
      ASSERT_TRUE(crumbd.WaitServing()) << LogOf(crumbd);
    }
    ASSERT_TRUE((*client)->WaitConnected(seconds(30)));
    const Found found = ReadAll(**client);
    EXPECT_EQ(found.wrong, 0u);
    EXPECT_EQ(found.missing, 0u) << "what is durable is there, from memory or SSD\n"
                                 << LogOf(crumbd);
    std::cout << "round " << round << ": " << found.right << " right" << std::endl;
  }
  load.Stop();
  EXPECT_EQ(load.wrong(), 0u);
  EXPECT_EQ(crumbd.Stop(), 0) << LogOf(crumbd);
}

TEST(TakeoverTest, AKilledPredecessorIsFollowed) { KillOneOfTwo(/*kill_successor=*/false); }

TEST(TakeoverTest, AKilledSuccessorIsReplacedByItsPredecessor) {
  KillOneOfTwo(/*kill_successor=*/true);
}

TEST(TakeoverTest, WhatCannotBeIsRefusedAndChangesNothing) {
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), kSizes);
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "watcher");
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(Fill(**client));
  const uint64_t epoch = (*client)->epoch();
  // A configuration with these sockets and another SSD folder.
  const std::string config = folder.path() + "/crumbd.yaml";
  std::stringstream text;
  text << std::ifstream(config).rdbuf();
  std::string other = text.str();
  other.replace(other.find("/ssd\""), 5, "/ssd2\"");
  std::ofstream(config) << other;
  EXPECT_EQ(WaitEnd(crumbd.StartSuccessor()), 1);
  EXPECT_NE(LogOf(crumbd).find("store.ssd.path is"), std::string::npos) << LogOf(crumbd);
  // Memory that no machine has: refused before or by the successor itself, and the first goes on.
  other = text.str();
  other.replace(other.find("bytes_max: "), 11, "bytes_max: 4000000");
  std::ofstream(config) << other;
  EXPECT_EQ(WaitEnd(crumbd.StartSuccessor()), 1);
  std::ofstream(config) << text.str();
  ASSERT_TRUE(crumbd.WaitServing()) << LogOf(crumbd);
  ASSERT_TRUE((*client)->WaitConnected(seconds(30)));
  EXPECT_EQ((*client)->epoch(), epoch) << "it never stopped";
  EXPECT_EQ(ReadAll(**client).right, kPages);
  EXPECT_EQ(crumbd.Stop(), 0);
}

TEST(TakeoverTest, ASmallerSuccessorKeepsWhatItCan) {
  TemporaryFolder folder;
  StoreSizes sizes = kSizes;
  sizes.ssd_bytes = 0;
  CrumbdProcess crumbd(folder.path(), sizes);
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "watcher");
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(Fill(**client));
  const std::string config = folder.path() + "/crumbd.yaml";
  std::stringstream text;
  text << std::ifstream(config).rdbuf();
  std::string smaller = text.str();
  const std::string bytes = std::to_string(sizes.host_bytes);
  smaller.replace(smaller.find(bytes), bytes.size(), std::to_string(16 * kMiB));
  std::ofstream(config) << smaller;
  ASSERT_NO_FATAL_FAILURE(TakeOver(crumbd));
  ASSERT_TRUE((*client)->WaitConnected(seconds(30)));
  const Found found = ReadAll(**client);
  EXPECT_GT(found.right, 0u);
  EXPECT_EQ(found.wrong, 0u);
  EXPECT_EQ(found.right + found.missing, kPages);
  EXPECT_TRUE(Eventually([&] { return HostCapacity(**client) == 16 * kMiB; }));
  EXPECT_EQ(crumbd.Stop(), 0);
}

TEST(TakeoverTest, ADetachedOneGoesOnInTheBackground) {
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), kSizes);
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "watcher");
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(Fill(**client));
  const pid_t before = crumbd.pid();
  EXPECT_EQ(WaitEnd(crumbd.StartSuccessor(CrumbdProcess::Successor::kDetached)), 0);
  EXPECT_EQ(WaitEnd(before), 0) << LogOf(crumbd);
  crumbd.Follow(-1);
  ASSERT_TRUE((*client)->WaitConnected(seconds(30)));
  EXPECT_EQ(ReadAll(**client).right, kPages);
  // One that cannot serve says so to who started it, and the first goes on.
  const std::string config = folder.path() + "/crumbd.yaml";
  std::ofstream(config, std::ios::app) << "unknown: 1\n";
  EXPECT_EQ(WaitEnd(crumbd.StartSuccessor(CrumbdProcess::Successor::kDetached)), 1);
  // Its file of endpoints names the process.
  std::stringstream text;
  text << std::ifstream(folder.path() + "/crumbd.endpoints.json").rdbuf();
  const std::string endpoints = text.str();
  const size_t at = endpoints.find("\"pid\":");
  ASSERT_NE(at, std::string::npos) << endpoints;
  const pid_t pid = std::atoi(endpoints.c_str() + endpoints.find_first_of("0123456789", at));
  ASSERT_GT(pid, 1) << endpoints;
  ASSERT_EQ(::kill(pid, SIGTERM), 0);
  EXPECT_TRUE(
      Eventually([&] { return LogOf(crumbd).find("signal 15: stopping") != std::string::npos; }));
  EXPECT_TRUE(Eventually([&] { return !(*client)->connected(); }));
}

TEST(TakeoverTest, WithoutAnotherItStartsLikeAnyOther) {
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), kSizes);
  crumbd.Follow(crumbd.StartSuccessor());
  ASSERT_TRUE(crumbd.WaitServing()) << LogOf(crumbd);
  auto client = Connect(folder.path(), "watcher");
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE(Fill(**client));
  EXPECT_EQ(ReadAll(**client).right, kPages);
  EXPECT_EQ(crumbd.Stop(), 0);
}

}  // namespace
}  // namespace crumb::fault
