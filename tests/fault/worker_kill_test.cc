// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A worker that holds leases and reservations is killed. Its room is free again, and nothing else
// changes. The worker is this program again, with an argument.

#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"

extern char** environ;

namespace crumb::fault {
namespace {

constexpr int kPages = 64;
constexpr auto kReturnWait = std::chrono::seconds(10);

// Holds and gives back leases and reservations until it is killed. Writes one byte to `ready` when
// it holds the first ones.
int RunWorker(const std::string& socket_dir, int ready) {
  auto client = Connect(socket_dir, "victim");
  if (!client.ok()) return 1;
  auto pages = KnownPages::Open(**client);
  if (!pages.ok()) return 1;
  std::mt19937 random(static_cast<unsigned>(::getpid()));
  std::vector<std::shared_ptr<const client::Lease>> leases;
  for (int turn = 0;; ++turn) {
    const PageKey key = pages->Key(random() % kPages);
    client::AcquireRequest request;
    request.keyspace = pages->keyspace().id;
    request.generation = pages->keyspace().generation;
    request.keys = std::span(&key, 1);
    auto result = (*client)->Acquire(request);
    if (result.ok()) leases.push_back(result->lease);
    auto slots = (*client)->Reserve(4, pages->fragment_bytes(), std::chrono::seconds(1));
    if (random() % 3 == 0) leases.clear();
    if (random() % 4 == 0)
      (void)pages->Publish(**client, random() % (kPages - 1), 2);  // known already
    if (turn == 0 && ::write(ready, "r", 1) != 1) return 1;
  }
}

// Reserves room for page kPages, and writes half of it; or writes all and sends its Commit. Then
// writes one byte to `ready` and waits to be killed.
int RunWriter(const std::string& socket_dir, int ready, bool commits) {
  auto client = Connect(socket_dir, "writer");
  if (!client.ok()) return 1;
  auto pages = KnownPages::Open(**client);
  if (!pages.ok()) return 1;
  auto slots = (*client)->Reserve(1, pages->fragment_bytes(), std::chrono::seconds(5));
  if (!slots.ok() || slots->empty()) return 1;
  const std::vector<std::byte> bytes = pages->Fragment(kPages);
  const size_t written = commits ? bytes.size() : bytes.size() / 2;
  std::copy_n(bytes.begin(), written, slots->front().bytes().begin());
  std::unique_ptr<client::PendingCommit> pending;
  if (commits) {
    pending = (*client)->StartCommit(pages->keyspace().id, *std::move(slots), pages->tiles_bytes(),
                                     std::chrono::seconds(20));
  }
  if (::write(ready, "r", 1) != 1) return 1;
  while (true) ::pause();
}

class Worker {
 public:
  explicit Worker(const std::string& socket_dir, const char* role = "--worker") {
    int pipe[2];
    if (::pipe(pipe) != 0) return;
    const std::string ready = std::to_string(pipe[1]);
    const char* arguments[] = {"worker_kill_test", role, socket_dir.c_str(), ready.c_str(),
                               nullptr};
    ::posix_spawn(&pid_, "/proc/self/exe", nullptr, nullptr, const_cast<char**>(arguments),
                  environ);
    ::close(pipe[1]);
    char byte;
    ready_ = ::read(pipe[0], &byte, 1) == 1;
    ::close(pipe[0]);
  }
  bool ready() const { return ready_; }
  void Kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  bool ready_ = false;
};

struct Held {
  uint32_t leases;
  uint32_t reservations;
  std::vector<uint64_t> resident;

  friend bool operator==(const Held&, const Held&) = default;
};

Held HeldNow(client::Client& client) {
  const auto stats = client.Stats();
  EXPECT_TRUE(stats.ok()) << stats.status();
  if (!stats.ok()) return {};
  Held held{stats->leases, stats->reservations, {}};
  for (const auto& tier : stats->tiers) held.resident.push_back(tier.resident_bytes);
  return held;
}

TEST(WorkerKillTest, LeasesAndReservationsReturn) {
  const int rounds = FaultRounds(5);
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), {});
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "watcher");
  ASSERT_TRUE(client.ok()) << client.status();
  auto pages = KnownPages::Open(**client);
  ASSERT_TRUE(pages.ok()) << pages.status();
  for (int first = 0; first < kPages; first += 8) {
    ASSERT_TRUE(pages->Publish(**client, static_cast<uint64_t>(first), 8).ok());
  }
  ASSERT_TRUE((*client)->Flush(std::chrono::seconds(20)).ok());
  const Held before = HeldNow(**client);
  ASSERT_EQ(before.leases, 0u);
  ASSERT_EQ(before.reservations, 0u);

  std::mt19937 random(7);
  int held_something = 0;
  for (int round = 0; round < rounds; ++round) {
    Worker worker(folder.path());
    ASSERT_TRUE(worker.ready());
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
    const Held during = HeldNow(**client);
    if (during.leases + during.reservations > 0) ++held_something;
    worker.Kill();
    const auto deadline = std::chrono::steady_clock::now() + kReturnWait;
    Held after = HeldNow(**client);
    while (after != before && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      after = HeldNow(**client);
    }
    EXPECT_EQ(after.leases, 0u) << "round " << round;
    EXPECT_EQ(after.reservations, 0u) << "round " << round;
    EXPECT_EQ(after.resident, before.resident) << "round " << round;
  }
  EXPECT_GT(held_something, 0) << "the test never saw a worker hold anything";
  EXPECT_EQ(crumbd.Stop(), 0);
}

// Between its Reserve and its Commit, and while crumbd serves the Commit.
TEST(WorkerKillTest, APageIsWholeOrNotThere) {
  const int rounds = FaultRounds(5);
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), {});
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "watcher");
  ASSERT_TRUE(client.ok()) << client.status();
  auto pages = KnownPages::Open(**client);
  ASSERT_TRUE(pages.ok()) << pages.status();
  const PageKey key = pages->Key(kPages);
  for (int round = 0; round < rounds; ++round) {
    for (const bool commits : {false, true}) {
      Worker writer(folder.path(), commits ? "--committer" : "--writer");
      ASSERT_TRUE(writer.ready());
      if (!commits) {
        EXPECT_EQ(HeldNow(**client).reservations, 1u);
      }
      writer.Kill();
      EXPECT_TRUE(Eventually([&] { return HeldNow(**client).reservations == 0; }));
      const auto read = pages->ReadBack(**client, kPages, std::chrono::seconds(5));
      ASSERT_TRUE(read.ok()) << read.status();
      if (!commits) {
        EXPECT_FALSE(*read) << "no process committed it";
      }
      ASSERT_TRUE(pages->Publish(**client, kPages, 1).ok());
      EXPECT_TRUE(pages->ReadBack(**client, kPages, std::chrono::seconds(5)).value());
      ASSERT_TRUE((*client)->Delete(pages->keyspace().id, std::span(&key, 1)).ok());
    }
  }
  EXPECT_EQ(crumbd.Stop(), 0);
}

// crumbd is killed instead: the worker's room is gone, and so may be its page.
TEST(WorkerKillTest, RoomOfACrumbdThatWasKilledCannotBeCommitted) {
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), {});
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "writer");
  ASSERT_TRUE(client.ok()) << client.status();
  auto pages = KnownPages::Open(**client);
  ASSERT_TRUE(pages.ok()) << pages.status();
  for (const bool sent : {false, true}) {
    auto slots = (*client)->Reserve(1, pages->fragment_bytes(), std::chrono::seconds(20));
    ASSERT_TRUE(slots.ok()) << slots.status();
    const std::vector<std::byte> bytes = pages->Fragment(kPages);
    std::copy(bytes.begin(), bytes.end(), slots->front().bytes().begin());
    const auto commit = [&] {
      return (*client)->StartCommit(pages->keyspace().id, *std::move(slots), pages->tiles_bytes(),
                                    std::chrono::seconds(20));
    };
    std::unique_ptr<client::PendingCommit> pending;
    if (sent) pending = commit();
    crumbd.Kill();
    ASSERT_TRUE(crumbd.Start());
    ASSERT_TRUE(Eventually([&] { return (*client)->connected(); }));
    if (!sent) {
      pending = commit();
      EXPECT_EQ(pending->Finish().status().code(), absl::StatusCode::kAborted);
    } else if (const auto outcomes = pending->Finish(); !outcomes.ok()) {
      EXPECT_TRUE(absl::IsUnavailable(outcomes.status())) << outcomes.status();
    }
    pending.reset();
    ASSERT_TRUE(pages->ReadBack(**client, kPages, std::chrono::seconds(5)).ok());
    EXPECT_EQ(HeldNow(**client).reservations, 0u);
    ASSERT_TRUE(pages->Publish(**client, kPages, 1).ok());
    EXPECT_TRUE(pages->ReadBack(**client, kPages, std::chrono::seconds(5)).value());
  }
}

}  // namespace
}  // namespace crumb::fault

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--worker") == 0) {
    return crumb::fault::RunWorker(argv[2], std::atoi(argv[3]));
  }
  const bool commits = argc == 4 && std::strcmp(argv[1], "--committer") == 0;
  if (commits || (argc == 4 && std::strcmp(argv[1], "--writer") == 0)) {
    return crumb::fault::RunWriter(argv[2], std::atoi(argv[3]), commits);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
