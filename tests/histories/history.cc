// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/histories/history.h"

#include <array>
#include <iterator>
#include <random>
#include <utility>

#include "fmt/format.h"

namespace crumb::histories {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// How often each act is chosen, against the others.
struct Weight {
  Act act;
  const char* name;
  uint32_t weight;
};
constexpr std::array<Weight, kActs> kWeights = {{
    {Act::kOpenSession, "open-session", 30},
    {Act::kDisconnect, "disconnect", 6},
    {Act::kKill, "kill", 6},
    {Act::kReserve, "reserve", 60},
    {Act::kCommit, "commit", 220},
    {Act::kCommitTwice, "commit-twice", 20},
    {Act::kAbort, "abort", 8},
    {Act::kPut, "put", 20},
    {Act::kAcquire, "acquire", 220},
    {Act::kJoin, "join", 12},
    {Act::kRelease, "release", 90},
    {Act::kGiveUp, "give-up", 6},
    {Act::kLookup, "lookup", 15},
    {Act::kPrefetch, "prefetch", 8},
    {Act::kPin, "pin", 8},
    {Act::kUnpin, "unpin", 5},
    {Act::kDelete, "delete", 16},
    {Act::kDrop, "drop", 4},
    {Act::kSetState, "set-state", 3},
    {Act::kFlush, "flush", 14},
    {Act::kNotices, "notices", 20},
    {Act::kPoolJoin, "pool-join", 12},
    {Act::kPoolOffer, "pool-offer", 6},
    {Act::kPoolReserve, "pool-reserve", 24},
    {Act::kPoolCommit, "pool-commit", 90},
    {Act::kPoolRelease, "pool-release", 40},
    {Act::kPoolLeave, "pool-leave", 12},
    {Act::kPoolReclaim, "pool-reclaim", 12},
    {Act::kPoolCheck, "pool-check", 6},
    {Act::kDiskFull, "disk-full", 4},
    {Act::kDiskWriteErrors, "disk-write-errors", 4},
    {Act::kDiskReadErrors, "disk-read-errors", 4},
    {Act::kDiskRecordErrors, "disk-record-errors", 3},
    {Act::kDiskDamage, "disk-damage", 4},
    {Act::kDiskSpeed, "disk-speed", 10},
    {Act::kTime, "time", 14},
    {Act::kSettle, "settle", 14},
    {Act::kCrash, "crash", 4},
    {Act::kTakeover, "takeover", 4},
}};

// Arguments are taken modulo small numbers.
constexpr uint32_t kArguments = 100'000;
constexpr uint32_t kStepsMin = 60;
constexpr uint32_t kStepsMax = 220;
constexpr std::array<uint32_t, 4> kPreemptions = {0, 8, 64, 256};
constexpr std::array<uint32_t, 3> kPauses = {4, 16, 80};

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }
  bool Chance(uint32_t percent) { return Below(100) < percent; }
  template <typename Container>
  auto OneOf(const Container& container) {
    return container[Below(static_cast<uint32_t>(std::size(container)))];
  }

 private:
  std::mt19937_64 random_;
};

Profile MakeProfile(Generator& random) {
  Profile profile;
  profile.preemption = random.OneOf(kPreemptions);
  profile.own_slabs = random.Chance(50);
  // With slabs of their own, tenants need one each.
  profile.host_bytes = (random.Chance(60) && !profile.own_slabs ? 2 : 4) * kMiB;
  profile.disk_fragments = random.Chance(50) ? 24 : 160;
  profile.second_hit = random.Chance(15);
  profile.reads_notices = random.Chance(50);
  profile.write_queue = random.Chance(30) ? 3 : 64;
  profile.read_queue = random.Chance(20) ? 2 : 64;
  profile.blank_percent = random.Chance(50) ? 0 : 20;
  profile.pool_slots = random.Chance(50) ? 3 : 8;
  return profile;
}

// Histories have different subjects: most acts keep their weight, some become frequent, some are
// left out.
std::array<uint32_t, kActs> MakeWeights(Generator& random) {
  std::array<uint32_t, kActs> weights;
  for (size_t i = 0; i < kWeights.size(); ++i) {
    weights[i] = kWeights[i].weight;
    if (random.Chance(15)) {
      weights[i] *= 4;
    } else if (random.Chance(10)) {
      weights[i] = 0;
    }
  }
  return weights;
}

Act Choose(Generator& random, const std::array<uint32_t, kActs>& weights) {
  uint32_t total = 0;
  for (const uint32_t weight : weights) total += weight;
  uint32_t place = random.Below(total);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (place < weights[i]) return kWeights[i].act;
    place -= weights[i];
  }
  return Act::kSettle;
}

}  // namespace

const char* NameOf(Act act) { return kWeights[static_cast<size_t>(act)].name; }

std::string Step::ToString() const {
  return fmt::format("{} worker={} a={} b={} c={} pause={}", NameOf(act), worker, a, b, c, pause);
}

std::string Profile::ToString() const {
  return fmt::format(
      "preemption {}/1024, host {} MiB, disk {} fragments, {} slabs, admission {}, write queue {}, "
      "read queue {}, blank {} %, {} slots a handle, notices read {}",
      preemption, host_bytes / kMiB, disk_fragments, own_slabs ? "own" : "common",
      second_hit ? "second_hit" : "all", write_queue, read_queue, blank_percent, pool_slots,
      reads_notices ? "at once" : "now and then");
}

History MakeHistory(uint64_t seed) {
  Generator random(seed * 0x9e3779b97f4a7c15 + 1);
  History history;
  history.seed = seed;
  history.schedule = seed;
  history.profile = MakeProfile(random);
  const std::array<uint32_t, kActs> weights = MakeWeights(random);
  const uint32_t pause = random.OneOf(kPauses);
  const uint32_t steps = kStepsMin + random.Below(kStepsMax - kStepsMin);
  for (uint32_t i = 0; i < steps; ++i) {
    Step step;
    step.act = Choose(random, weights);
    step.worker = random.Below(kWorkers);
    step.a = random.Below(kArguments);
    step.b = random.Below(kArguments);
    step.c = random.Below(kArguments);
    step.pause = random.Below(pause);
    history.steps.push_back(step);
  }
  return history;
}

}  // namespace crumb::histories
