// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>

#include "common/clock.h"

namespace crumb::server {

// Connections that have not sent their hello yet. A process sends it right after it connected, so
// one that stays silent is broken or hostile; but how long a busy process takes is not known.
//
// The places are shared fairly: when all are taken, the user with the most connections loses its
// oldest one, and only after it was silent for `grace`. Until then new connections wait in the
// socket's backlog. So a flood of one user closes no connection of another, and none of its own
// that says hello in time. Not thread-safe.
class Handshakes {
 public:
  // REQUIRES: max is 1 or more, 0 < grace <= timeout.
  Handshakes(size_t max, Duration grace, Duration timeout)
      : max_(max), grace_(grace), timeout_(timeout) {}

  bool full() const { return connections_.size() >= max_; }
  // `number` is larger than all before.
  void Add(uint64_t number, unsigned user, TimePoint now);
  // Does nothing for a number that is not there.
  void Remove(uint64_t number);

  // The oldest connection, if it has been silent for `timeout`.
  std::optional<uint64_t> Late(TimePoint now) const;
  // The connection that gives its place to a new one; none if it is not silent for `grace` yet.
  std::optional<uint64_t> ToClose(TimePoint now) const;

  // When Late names a connection; TimePoint::max(): there is none.
  TimePoint NextLate() const;
  // When ToClose does.
  TimePoint NextToClose() const;

 private:
  struct Connection {
    unsigned user = 0;
    TimePoint since;
  };
  // Its key in connections_; 0 if there is none.
  uint64_t OldestOfTheLargestUser() const;

  const size_t max_;
  const Duration grace_;
  const Duration timeout_;
  std::map<uint64_t, Connection> connections_;  // keyed by number, so the oldest is first
  std::map<unsigned, std::set<uint64_t>> users_;
};

}  // namespace crumb::server
