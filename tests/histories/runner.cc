// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/histories/runner.h"

#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/histories/failure.h"

namespace crumb::histories {
namespace {

// Bound on the processor time of a history, in seconds. It takes milliseconds, and fibers that wait
// for each other are a deadlock at once, so one that takes this long hangs. Time that passes while
// the machine runs other programs does not count.
constexpr time_t kCpuSecondsMax = 60;
// Bound on the time from its begin to its end, in seconds, for one that waits in a system call.
constexpr unsigned kSecondsMax = 3600;
// Orders of fibers that a smaller history is tried with.
constexpr uint64_t kSchedules = 3;

// The child's report to its parent, in memory that both have.
struct Report {
  bool finished;
  bool broken;
  World::Counts counts;
  char rule[64];
  char what[4096];
};
Report* report = nullptr;

Report* SharedReport() {
  static Report* const shared = [] {
    void* memory =
        ::mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return static_cast<Report*>(memory);
  }();
  return shared;
}

// Ends this process with SIGPROF or SIGALRM once it has taken too long.
void BoundTime() {
  const itimerval bound = {.it_interval = {}, .it_value = {.tv_sec = kCpuSecondsMax, .tv_usec = 0}};
  ::setitimer(ITIMER_PROF, &bound, nullptr);
  ::alarm(kSecondsMax);
}

Broken BrokenBySignal(int signal) {
  switch (signal) {
    case SIGPROF:
      return {"no-hang", fmt::format("no end after {} s of processor time", kCpuSecondsMax)};
    case SIGALRM:
      return {"no-hang", fmt::format("no end after {} s", kSecondsMax)};
    default:
      return {"no-crash", fmt::format("signal {}", ::strsignal(signal))};
  }
}

}  // namespace

void FailWith(const std::string& rule, const std::string& what) {
  if (report == nullptr) {
    std::fprintf(stderr, "%s: %s\n", rule.c_str(), what.c_str());
    std::abort();
  }
  std::snprintf(report->rule, sizeof(report->rule), "%s", rule.c_str());
  std::snprintf(report->what, sizeof(report->what), "%s", what.c_str());
  report->broken = true;
  ::_exit(1);
}

Outcome RunHistory(const History& history, const std::string& tenants_file, bool trace) {
  Report* const shared = SharedReport();
  std::memset(static_cast<void*>(shared), 0, sizeof(Report));
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child < 0) std::abort();
  if (child == 0) {
    report = shared;
    BoundTime();
    World world(history, tenants_file, trace);
    world.Run();
    shared->counts = world.counts();
    shared->finished = true;
    ::_exit(0);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
  }
  Outcome outcome;
  if (shared->broken) {
    outcome.broken = Broken{shared->rule, shared->what};
  } else if (WIFSIGNALED(status)) {
    outcome.broken = BrokenBySignal(WTERMSIG(status));
  } else if (!shared->finished) {
    outcome.broken = Broken{"no-crash", "the process ended"};
  }
  outcome.counts = shared->counts;
  return outcome;
}

History Shrink(const History& history, const Broken& broken, const std::string& tenants_file,
               int runs_max) {
  History smallest = history;
  int runs = 0;
  const auto breaks = [&](History& candidate) {
    for (uint64_t i = 0; i < kSchedules && runs < runs_max; ++i) {
      candidate.schedule = history.schedule + i * 0x51ed2701;
      ++runs;
      const Outcome outcome = RunHistory(candidate, tenants_file, false);
      if (outcome.broken && outcome.broken->rule == broken.rule) return true;
    }
    return false;
  };
  size_t part = std::max<size_t>(smallest.steps.size() / 2, 1);
  while (runs < runs_max) {
    bool smaller = false;
    for (size_t begin = 0; begin < smallest.steps.size() && runs < runs_max;) {
      History candidate = smallest;
      const size_t end = std::min(begin + part, candidate.steps.size());
      candidate.steps.erase(candidate.steps.begin() + static_cast<std::ptrdiff_t>(begin),
                            candidate.steps.begin() + static_cast<std::ptrdiff_t>(end));
      if (breaks(candidate)) {
        smallest = std::move(candidate);
        smaller = true;
      } else {
        begin = end;
      }
    }
    if (!smaller && part == 1) break;
    if (!smaller) part = std::max<size_t>(part / 2, 1);
  }
  return smallest;
}

}  // namespace crumb::histories
