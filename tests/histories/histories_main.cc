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
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
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

// Sums of the histories of one job, in memory that all jobs have.
struct Totals {
  uint64_t histories;
  World::Counts counts;
};

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

// Every jobs-th history from `first + job` on. False: one broke a rule.
bool RunJob(const Arguments& arguments, unsigned job, unsigned jobs,
            const std::string& tenants_file, Totals& totals) {
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = job; i < arguments.histories; i += jobs) {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (arguments.seconds > 0 && taken.count() > arguments.seconds) break;
    const History history = MakeHistory(arguments.first + i);
    const Outcome outcome = RunHistory(history, tenants_file, arguments.trace);
    if (outcome.broken) {
      Explain(history, *outcome.broken, tenants_file, arguments);
      return false;
    }
    ++totals.histories;
    Add(totals.counts, outcome.counts);
  }
  return true;
}

int Run(const Arguments& arguments, const std::string& tenants_file) {
  const unsigned jobs =
      std::max(1u, arguments.jobs > 0 ? arguments.jobs : std::thread::hardware_concurrency());
  void* const memory = ::mmap(nullptr, jobs * sizeof(Totals), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  auto* const totals = static_cast<Totals*>(memory);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<pid_t> children;
  for (unsigned job = 0; job < jobs; ++job) {
    const pid_t child = ::fork();
    if (child == 0) {
      std::_Exit(RunJob(arguments, job, jobs, tenants_file, totals[job]) ? 0 : 1);
    }
    children.push_back(child);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    good &= ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  Totals sum = {};
  for (unsigned job = 0; job < jobs; ++job) {
    sum.histories += totals[job].histories;
    Add(sum.counts, totals[job].counts);
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  std::printf(
      "%llu histories in %.1f s: %llu steps, %llu calls, %llu fragments committed, %llu pages hit, "
      "%llu of device pools, %llu durable pages asked for after crashes, %llu switches of fibers: "
      "%s\n",
      static_cast<unsigned long long>(sum.histories), taken.count(),
      static_cast<unsigned long long>(sum.counts.steps),
      static_cast<unsigned long long>(sum.counts.calls),
      static_cast<unsigned long long>(sum.counts.commits),
      static_cast<unsigned long long>(sum.counts.hits),
      static_cast<unsigned long long>(sum.counts.device_hits),
      static_cast<unsigned long long>(sum.counts.durable_checked),
      static_cast<unsigned long long>(sum.counts.switches),
      good ? "no rule broken" : "A RULE IS BROKEN");
  return good ? 0 : 1;
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
