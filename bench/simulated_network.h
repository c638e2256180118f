// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace crumb::bench {

struct NetworkOptions {
  double rtt_us = 50;         // round trip between nodes of one zone
  double rtt_zones_us = 500;  // round trip between nodes of different zones
  int zones = 3;              // node i is in zone i modulo zones
  double nic_gbit = 100;      // rate of each node, in each direction
};

// Time that messages take between nodes: half a round trip each way, and a queue at each network
// card and direction, first come, first served. Transfers are to be added in the order in which
// requests arrive; of two that overlap, the one that was added first goes first, also if it was
// ready a moment later. Times are in seconds.
class SimulatedNetwork {
 public:
  SimulatedNetwork(size_t nodes, const NetworkOptions& options)
      : options_(options), out_free_(nodes, 0), in_free_(nodes, 0) {}

  double RoundTrip(size_t a, size_t b) const {
    const auto zones = static_cast<size_t>(options_.zones);
    return 1e-6 * (a % zones == b % zones ? options_.rtt_us : options_.rtt_zones_us);
  }

  // Sends bytes that are ready at `ready`. Returns when the last one has arrived.
  double Send(size_t from, size_t to, double ready, uint64_t bytes) {
    const double seconds = static_cast<double>(bytes) * 8 / (options_.nic_gbit * 1e9);
    const double way = RoundTrip(from, to) / 2;
    const double sent_from = std::max(ready, out_free_[from]);
    out_free_[from] = sent_from + seconds;
    const double received_from = std::max(sent_from + way, in_free_[to]);
    in_free_[to] = received_from + seconds;
    return in_free_[to];
  }

 private:
  const NetworkOptions options_;
  std::vector<double> out_free_;  // when each card has sent all that was queued
  std::vector<double> in_free_;   // when it has received all
};

}  // namespace crumb::bench
