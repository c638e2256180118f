// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

// Means with standard errors, and paired bootstraps: the same draws for both sides. Deterministic.
namespace crumb::bench {

struct Estimate {
  double mean = 0.0;
  double error = 0.0;  // standard error of the mean; 0 for fewer than two values
};

Estimate EstimateOf(const std::vector<double>& values);

// A figure and the 2.5 and 97.5 % points of its bootstrap distribution.
struct Interval {
  double value = 0.0;
  double low = 0.0;
  double high = 0.0;
};

// sum(above) / sum(below) over drawn entries; below's sum is positive in every draw. With sums over
// clusters above and their sizes below it is the mean over units that lie in clusters.
Interval BootstrapRatio(const std::vector<double>& above, const std::vector<double>& below);

}  // namespace crumb::bench
