// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A process that commits under load is killed at a random moment, again and again over one folder.
// Pages that it reported durable are there afterwards, and no served byte is wrong.

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

constexpr int kRoundsPerRun = 6;     // CRUMB_KILL_ROUNDS: more
constexpr uint64_t kPagesMax = 400;  // pages of a round: all rounds fit into the budget

struct Report {
  uint64_t round = 0;
  uint64_t page = 0;
};

StoreOptions Options(const std::string& folder) {
  StoreOptions options = SmallStore(folder);
  options.ssd.bytes_max = ByteSize{uint64_t{512} << 20};
  return options;
}

// The child: commits pages of this round and reports each that is durable; never returns.
[[noreturn]] void CommitUntilKilled(const std::string& folder, uint64_t round, int report_to) {
  std::map<PageKey, uint64_t> numbers;
  for (uint64_t i = 0; i < kPagesMax; ++i) numbers[SampleKey(round, i)] = i;
  StoreEvents events;
  events.durable = [&](const KeyspaceId&, const PageKey& key) {
    const auto found = numbers.find(key);
    if (found == numbers.end()) return;
    const Report report = {round, found->second};
    if (::write(report_to, &report, sizeof(report)) != sizeof(report)) ::_exit(3);
  };
  auto store = TieredStore::Open(Options(folder), Clock::Real(), events);
  if (!store.ok()) ::_exit(4);
  for (uint64_t i = 0; i < kPagesMax; ++i) {
    if (!Commit(**store, SamplePage(round, i)).ok()) ::_exit(5);
    // Something to read and something to remove are part of the load.
    const auto result = Acquire(**store, RequestOf(round > 0 ? round - 1 : 0, i % 50 + 1));
    if (result.ok()) (*store)->Release(result->lease);
  }
  while (true) ::pause();
}

struct Moment {
  size_t reports = 0;  // kills the child after so many reports
  std::chrono::microseconds pause{0};
};

// In one round in two the kill follows pages that are durable, however slow the machine is; in the
// others it comes at any time, while the store is opened, too.
Moment RandomMoment(uint64_t round, std::mt19937& random) {
  if (round % 2 == 0) return {1 + random() % 100, std::chrono::microseconds(random() % 5000)};
  return {0, std::chrono::milliseconds(20 + random() % 400)};
}

// False: there is none any more, or none for long.
bool ReadReport(int pipe, std::vector<Report>* reports) {
  constexpr int kPatienceMs = 60'000;
  pollfd waiting{pipe, POLLIN, 0};
  Report report;
  if (::poll(&waiting, 1, kPatienceMs) != 1) return false;
  if (::read(pipe, &report, sizeof(report)) != sizeof(report)) return false;
  reports->push_back(report);
  return true;
}

// Runs the child, kills it at `moment`, and returns its reports.
std::vector<Report> RunAndKill(const std::string& folder, uint64_t round, Moment moment,
                               int* status) {
  int pipe[2];
  if (::pipe(pipe) != 0) return {};
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(pipe[0]);
    CommitUntilKilled(folder, round, pipe[1]);
  }
  ::close(pipe[1]);
  std::vector<Report> reports;
  while (reports.size() < moment.reports && ReadReport(pipe[0], &reports)) {
  }
  std::this_thread::sleep_for(moment.pause);
  ::kill(child, SIGKILL);
  while (ReadReport(pipe[0], &reports)) {
  }
  ::close(pipe[0]);
  ::waitpid(child, status, 0);
  return reports;
}

TEST(Kill, DurablePagesAreThereAndNoByteIsWrong) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const char* wanted = std::getenv("CRUMB_KILL_ROUNDS");
  const uint64_t rounds = static_cast<uint64_t>(wanted ? std::atoi(wanted) : kRoundsPerRun);
  TemporaryFolder folder;
  std::vector<Report> durable;
  for (uint64_t round = 0; round < rounds; ++round) {
    int status = 0;
    const Moment moment = RandomMoment(round, random);
    const std::vector<Report> reports = RunAndKill(folder.path(), round, moment, &status);
    EXPECT_GE(reports.size(), moment.reports);
    durable.insert(durable.end(), reports.begin(), reports.end());
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  }
  auto store = TieredStore::Open(Options(folder.path()), Clock::Real(), {});
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_GT(durable.size(), 0u);
  for (const Report& report : durable) {
    AcquireRequest request = RequestOf(report.round, 0);
    request.keys = {SampleKey(report.round, report.page)};
    const auto result = Acquire(**store, request);
    ASSERT_TRUE(result.ok());
    ASSERT_EQ(result->hit_pages, 1u) << "round " << report.round << " page " << report.page;
    ASSERT_TRUE(AllRight(**store, request, *result));
    (*store)->Release(result->lease);
  }
  for (uint64_t round = 0; round < rounds; ++round) {
    const AcquireRequest request = RequestOf(round, kPagesMax);
    const auto result = Acquire(**store, request);
    ASSERT_TRUE(result.ok());
    ASSERT_TRUE(AllRight(**store, request, *result));
    if (result->lease != 0) (*store)->Release(result->lease);
  }
  EXPECT_EQ((*store)->Stats().verify_failures_ssd, 0u);
}

}  // namespace
}  // namespace crumb::storage
