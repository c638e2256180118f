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
// that says hello in time.
//
// FdListener has one and closes the connections that this class names; the class itself knows only
// numbers, users and times. Not thread-safe.
class Handshakes {
 public:
  // REQUIRES: max is 1 or more, 0 < grace <= timeout. `max` is the number of places.
  Handshakes(size_t max, Duration grace, Duration timeout)
      : max_(max), grace_(grace), timeout_(timeout) {}

  // Returns whether all places are taken; the owner then accepts nothing unless ToClose names one.
  bool full() const { return connections_.size() >= max_; }
  // Adds a connection. `number` is larger than all before. The class does not check that there is a
  // place.
  void Add(uint64_t number, unsigned user, TimePoint now);
  // Removes a connection, because its hello came or it was closed. Does nothing for a number that
  // is not there.
  void Remove(uint64_t number);

  // Returns the oldest connection if it has been silent for `timeout`; the owner closes it.
  std::optional<uint64_t> Late(TimePoint now) const;
  // Returns the connection that gives its place to a new one: the oldest of the user with the most.
  // Returns none if it is not silent for `grace` yet.
  std::optional<uint64_t> ToClose(TimePoint now) const;

  // Returns the time at which Late names a connection; TimePoint::max(): there is none.
  TimePoint NextLate() const;
  // Returns the time at which ToClose names one; TimePoint::max(): there is none.
  TimePoint NextToClose() const;

 private:
  struct Connection {
    unsigned user = 0;
    TimePoint since;
  };
  // Returns its key in connections_; 0 if there is none. Of users with equally many, the one with
  // the oldest connection counts.
  uint64_t OldestOfTheLargestUser() const;

  const size_t max_;
  const Duration grace_;
  const Duration timeout_;
  std::map<uint64_t, Connection> connections_;  // keyed by number, so the oldest is first
  std::map<unsigned, std::set<uint64_t>> users_;
};

}  // namespace crumb::server
