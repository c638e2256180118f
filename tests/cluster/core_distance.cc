// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/cluster/core_distance.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>

namespace crumb {
namespace {

using std::chrono::steady_clock;

constexpr auto kLength = std::chrono::milliseconds(30);
constexpr int kRoundTrips = 200;  // timed at once; the shortest time is the undisturbed one
constexpr uint64_t kEnd = UINT64_MAX;

bool MoveTo(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(core), &set);
  return ::sched_setaffinity(0, sizeof(set), &set) == 0;
}

// A line of its own: odd, it is the other thread's turn.
struct alignas(128) Ball {
  std::atomic<uint64_t> turn{0};
};

void Reply(Ball& ball) {
  for (uint64_t turn = ball.turn; turn != kEnd; turn = ball.turn) {
    if (turn % 2 == 1) ball.turn.compare_exchange_strong(turn, turn + 1);
  }
}

double ShortestNs(Ball& ball) {
  double shortest = std::numeric_limits<double>::max();
  uint64_t turn = 0;
  for (const auto end = steady_clock::now() + kLength; steady_clock::now() < end;) {
    const auto began = steady_clock::now();
    for (int i = 0; i < kRoundTrips; ++i) {
      ball.turn = turn + 1;
      turn += 2;
      while (ball.turn != turn) {
      }
    }
    const std::chrono::duration<double, std::nano> took = steady_clock::now() - began;
    shortest = std::min(shortest, took.count() / (2 * kRoundTrips));
  }
  ball.turn = kEnd;
  return shortest;
}

}  // namespace

absl::StatusOr<double> CoreDistanceNs(int one, int other) {
  cpu_set_t before;
  const bool usable = one != other && std::min(one, other) >= 0 &&
                      std::max(one, other) < CPU_SETSIZE &&
                      ::sched_getaffinity(0, sizeof(before), &before) == 0 &&
                      CPU_ISSET(static_cast<size_t>(one), &before) &&
                      CPU_ISSET(static_cast<size_t>(other), &before);
  if (!usable) {
    return absl::InvalidArgumentError("cores " + std::to_string(one) + " and " +
                                      std::to_string(other) + " are not two of this process");
  }
  Ball ball;
  std::thread responder([&] {
    if (MoveTo(other)) Reply(ball);
  });
  double shortest = 0;
  std::thread requester([&] {
    if (MoveTo(one)) shortest = ShortestNs(ball);
  });
  requester.join();
  responder.join();
  return shortest;
}

}  // namespace crumb
