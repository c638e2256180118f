// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "transport/counters.h"
#include "transport/outgoing_answer.h"
#include "transport/timers.h"

namespace crumb::transport {

// A peer's fetch under way: lives, and keeps its lease, until its last frame was sent or dropped.
struct Serve {
  Serve(Counters& all_counters, Timers& all_timers, uint64_t from, FetchId number, FetchBody wanted,
        TimePoint until)
      : counters(all_counters),
        timers(all_timers),
        connection(from),
        fetch(number),
        body(std::move(wanted)),
        deadline(until) {
    counters.serves_in_flight.fetch_add(1);
  }
  ~Serve() {
    timers.Remove(timer);
    counters.serves_in_flight.fetch_sub(1);
    counters.serve_bytes_in_flight.fetch_sub(bytes);
    counters.refusal_bytes.fetch_sub(refusal_bytes);
  }
  Serve(const Serve&) = delete;
  Serve& operator=(const Serve&) = delete;

  Counters& counters;
  Timers& timers;
  Timers::Id timer{};
  const uint64_t connection;
  const FetchId fetch;
  const FetchBody body;
  const TimePoint deadline;
  std::optional<OutgoingAnswer> answer;
  uint64_t bytes = 0;          // counted as in flight
  uint64_t refusal_bytes = 0;  // counted as a busy answer's
  int answers_unsent = 0;      // frames that are with the link
};

}  // namespace crumb::transport
