// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>

namespace crumb::bench {
namespace {

constexpr int kDraws = 10000;

double SumOf(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum;
}

}  // namespace

Estimate EstimateOf(const std::vector<double>& values) {
  Estimate estimate;
  if (values.empty()) return estimate;
  const double n = static_cast<double>(values.size());
  estimate.mean = SumOf(values) / n;
  double squares = 0.0;
  for (const double value : values) squares += std::pow(value - estimate.mean, 2);
  if (n > 1) estimate.error = std::sqrt(squares / (n - 1) / n);
  return estimate;
}

Interval BootstrapRatio(const std::vector<double>& above, const std::vector<double>& below) {
  std::mt19937 random(1);
  std::vector<double> ratios(kDraws);
  for (double& ratio : ratios) {
    double ours = 0.0, theirs = 0.0;
    for (size_t i = 0; i < above.size(); ++i) {
      const size_t drawn = random() % above.size();
      ours += above[drawn];
      theirs += below[drawn];
    }
    ratio = ours / theirs;
  }
  std::sort(ratios.begin(), ratios.end());
  return {SumOf(above) / SumOf(below), ratios[kDraws / 40], ratios[kDraws - 1 - kDraws / 40]};
}

}  // namespace crumb::bench
