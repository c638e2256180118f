// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/latencies.h"

#include <algorithm>
#include <cmath>

namespace crumb::bench {

double ToMicroseconds(Duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

double ToSeconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

double Latencies::Percentile(double share) const {
  if (microseconds_.empty()) return 0;
  std::vector<double> sorted = microseconds_;
  const double rank = std::ceil(share * static_cast<double>(sorted.size()));
  const size_t index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(index), sorted.end());
  return sorted[index];
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace crumb::bench
