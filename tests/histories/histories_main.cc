// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs random histories of a node with virtual time and checks them against a model: README.md.
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/logging.h"
#include "tests/histories/runner.h"

namespace crumb::histories {
namespace {

struct Arguments {
  uint64_t seed = 0;
  uint64_t first = 1;
  uint64_t histories = 2000;
  double seconds = 0;  // 0: no bound
  unsigned jobs = 0;   // 0: one for each processor
  int shrink_runs = 1500;
  bool trace = false;
};

// A line of progress is printed this often.
constexpr auto kProgressInterval = std::chrono::minutes(1);

// Sums of the histories of one job, in memory that all jobs have.
struct Totals {
  std::atomic<uint64_t> histories;
  World::Counts counts;  // valid when the job has ended
};

// The state that all jobs share, in a mapping of its own.
struct Shared {
  std::atomic<bool> stop = false;  // set by SIGINT and SIGTERM: no job begins another history
};
Shared* shared = nullptr;

// Exit codes; 2: the program could not run.
constexpr int kExitGood = 0;
constexpr int kExitBroken = 1;
constexpr int kExitStopped = 3;

// Maps zeroed memory for an array that the jobs share. Returns null if there is none.
template <typename T>
T* MapShared(size_t count) {
  void* const memory =
      ::mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  T* const begin = static_cast<T*>(memory);
  std::uninitialized_value_construct_n(begin, count);
  return begin;
}

void StopAtSignals() {
  struct sigaction action = {};
  action.sa_handler = [](int) { shared->stop.store(true); };
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

void Add(World::Counts& to, const World::Counts& of) {
  to.steps += of.steps;
  to.calls += of.calls;
  to.hits += of.hits;
  to.device_hits += of.device_hits;
  to.commits += of.commits;
  to.durable_checked += of.durable_checked;
  to.switches += of.switches;
}

void Print(const History& history, const Broken& broken) {
  std::printf("seed %llu, schedule %llu: %zu steps break %s: %s\n  %s\n",
              static_cast<unsigned long long>(history.seed),
              static_cast<unsigned long long>(history.schedule), history.steps.size(),
              broken.rule.c_str(), broken.what.c_str(), history.profile.ToString().c_str());
}

// Shrinks a history that broke a rule and prints both.
void Explain(const History& history, const Broken& broken, const std::string& tenants_file,
             const Arguments& arguments) {
  Print(history, broken);
  std::fflush(stdout);
  const History smallest = Shrink(history, broken, tenants_file, arguments.shrink_runs);
  const Outcome again = RunHistory(smallest, tenants_file, false);
  std::printf("shrunken:\n");
  Print(smallest, again.broken.value_or(broken));
  for (const Step& step : smallest.steps) std::printf("  %s\n", step.ToString().c_str());
  std::printf("again: crumb-histories --seed %llu\n",
              static_cast<unsigned long long>(history.seed));
  std::fflush(stdout);
}

// `seed` is that of the history which begins now.
void PrintProgress(const Arguments& arguments, std::span<const Totals> totals, uint64_t seed,
                   double seconds) {
  uint64_t done = 0;
  for (const Totals& job : totals) done += job.histories.load();
  std::fprintf(stderr, "%llu of %llu histories in %.0f s, %.1f a second, at seed %llu\n",
               static_cast<unsigned long long>(done),
               static_cast<unsigned long long>(arguments.histories), seconds,
               static_cast<double>(done) / seconds, static_cast<unsigned long long>(seed));
}

// Runs each history that is the job's turn; totals: of all jobs. False: one broke a rule. The first
// job prints the progress of all.
bool RunJob(const Arguments& arguments, unsigned job, const std::string& tenants_file,
            std::span<Totals> totals) {
  const auto begin = std::chrono::steady_clock::now();
  auto printed = begin;
  for (uint64_t i = job; i < arguments.histories && !shared->stop.load(); i += totals.size()) {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> taken = now - begin;
    if (arguments.seconds > 0 && taken.count() > arguments.seconds) break;
    if (job == 0 && now - printed >= kProgressInterval) {
      PrintProgress(arguments, totals, arguments.first + i, taken.count());
      printed = now;
    }
    const History history = MakeHistory(arguments.first + i);
    const Outcome outcome = RunHistory(history, tenants_file, arguments.trace);
    if (outcome.broken) {
      Explain(history, *outcome.broken, tenants_file, arguments);
      return false;
    }
    ++totals[job].histories;
    Add(totals[job].counts, outcome.counts);
  }
  return true;
}

int Run(const Arguments& arguments, const std::string& tenants_file) {
  const unsigned jobs =
      std::max(1u, arguments.jobs > 0 ? arguments.jobs : std::thread::hardware_concurrency());
  shared = MapShared<Shared>(1);
  Totals* const mapped = MapShared<Totals>(jobs);
  if (shared == nullptr || mapped == nullptr) return 2;
  const std::span totals(mapped, jobs);
  StopAtSignals();
  const auto begin = std::chrono::steady_clock::now();
  std::vector<pid_t> children;
  for (unsigned job = 0; job < jobs; ++job) {
    const pid_t child = ::fork();
    if (child == 0) {
      std::_Exit(RunJob(arguments, job, tenants_file, totals) ? kExitGood : kExitBroken);
    }
    children.push_back(child);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    good &= ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  uint64_t histories = 0;
  World::Counts counts = {};
  for (unsigned job = 0; job < jobs; ++job) {
    histories += totals[job].histories.load();
    Add(counts, totals[job].counts);
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  const bool stopped = shared->stop.load();
  std::printf(
      "%llu histories in %.1f s: %llu steps, %llu calls, %llu fragments committed, %llu pages hit, "
      "%llu of device pools, %llu durable pages requested after crashes, %llu switches of fibers: "
      "%s\n",
      static_cast<unsigned long long>(histories), taken.count(),
      static_cast<unsigned long long>(counts.steps), static_cast<unsigned long long>(counts.calls),
      static_cast<unsigned long long>(counts.commits), static_cast<unsigned long long>(counts.hits),
      static_cast<unsigned long long>(counts.device_hits),
      static_cast<unsigned long long>(counts.durable_checked),
      static_cast<unsigned long long>(counts.switches),
      !good     ? "A RULE IS BROKEN"
      : stopped ? "stopped by a signal, no rule broken so far"
                : "no rule broken");
  if (!good) return kExitBroken;
  return stopped ? kExitStopped : kExitGood;
}

// The order in which hash tables are walked follows from addresses. Starts the program again with
// addresses that are the same in every run, where the system allows that.
void FixAddresses(char** arguments) {
  const int now = ::personality(0xffffffff);
  if (now < 0 || (now & ADDR_NO_RANDOMIZE) != 0) return;
  if (::personality(static_cast<unsigned long>(now) | ADDR_NO_RANDOMIZE) < 0) return;
  ::execv("/proc/self/exe", arguments);
}

}  // namespace
}  // namespace crumb::histories

int main(int argc, char** argv) {
  using namespace crumb::histories;
  FixAddresses(argv);
  crumb::SetLogSeverity(crumb::Severity::kOff);
  Arguments arguments;
  CLI::App app("Random histories of a node with virtual time, checked against a model");
  app.add_option("--seed", arguments.seed, "runs this history alone");
  app.add_option("--first", arguments.first, "seed of the first history")->capture_default_str();
  app.add_option("--histories", arguments.histories, "how many")->capture_default_str();
  app.add_option("--seconds", arguments.seconds, "begins no history after so long; 0: no bound");
  app.add_option("--jobs", arguments.jobs, "processes; 0: one for each processor");
  app.add_option("--shrink-runs", arguments.shrink_runs, "histories run to make one smaller")
      ->capture_default_str();
  app.add_flag("--trace", arguments.trace, "prints each step before it runs");
  CLI11_PARSE(app, argc, argv);
  if (arguments.seed != 0) {
    arguments.first = arguments.seed;
    arguments.histories = arguments.jobs = 1;
  }
  std::string folder = std::filesystem::temp_directory_path() / "crumb-histories-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return 2;
  const int result = Run(arguments, WriteTenants(folder));
  std::filesystem::remove_all(folder);
  return result;
}
