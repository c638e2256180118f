// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/simulated_network.h"

#include <algorithm>

namespace crumb::bench {

double SimulatedNetwork::Send(size_t from, size_t to, double ready, uint64_t bytes) {
  const double seconds = static_cast<double>(bytes) * 8 / (options_.nic_gbit * 1e9);
  const double way = RoundTrip(from, to) / 2;
  const double sent_from = std::max(ready, out_free_[from]);
  out_free_[from] = sent_from + seconds;
  const double received_from = std::max(sent_from + way, in_free_[to]);
  in_free_[to] = received_from + seconds;
  return in_free_[to];
}

}  // namespace crumb::bench
