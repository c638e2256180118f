// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "common/clock.h"
#include "transport/link.h"
#include "transport/timers.h"

namespace crumb::transport {

struct Serve;

// A link with what both ends said in their hellos. Whoever connected fetches, whoever accepted
// serves. Of the progress thread.
struct Connection {
  enum class Phase : uint8_t { kHello, kUp };

  uint64_t id = 0;      // what the peer puts into frames to us
  uint64_t theirs = 0;  // what we put into frames to it
  uint16_t version = 0;
  Phase phase = Phase::kHello;
  bool ours = false;  // we connected
  std::string address;
  std::unique_ptr<Link> link;
  TimePoint used;
  Timers::Id timer;  // of the hello, later of idleness

  std::unordered_set<FetchId> fetches;                         // ours: under way
  std::unordered_map<FetchId, std::shared_ptr<Serve>> serves;  // theirs: under way
  std::deque<std::shared_ptr<Serve>> sending;                  // of them, those with frames left
  int frames_posted = 0;
  bool pumping = false;

  void Send(OutgoingFrame frame, FetchId fetch, std::shared_ptr<const void> keep,
            std::function<void()> sent);
};

}  // namespace crumb::transport
