// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

// The starting point of the search for a row's clip threshold. Rotated rows are nearly normally
// distributed, so the guess is that of a normal distribution. The guess affects the number of
// counting passes only: the search finds the exact threshold of any row.
namespace crumb::kernels::cuda {

struct ClipGuess {
  int rank = 0;        // the threshold is the rank-th largest magnitude; 0: no clip
  float first = 0.0f;  // first bound, as a multiple of the row's sum of magnitudes
  // distance between neighbouring magnitudes near the first bound, as a multiple of that sum
  float step = 0.0f;
};

// Returns the x that |y| / sigma of a normally distributed y stays below with this probability.
inline float TailQuantile(double probability) {
  double low = 0.0, high = 6.0;
  for (int i = 0; i < 40; ++i) {
    const double middle = 0.5 * (low + high);
    (std::erf(middle / std::sqrt(2.0)) < probability ? low : high) = middle;
  }
  return static_cast<float>(low);
}

// Returns the guess for `clip`, the fraction of magnitudes that are kept (<= 0: no clip).
inline ClipGuess GuessClip(float clip, int head_dim) {
  if (clip <= 0.0f) return {};
  const int index = std::min(static_cast<int>(clip * static_cast<float>(head_dim)), head_dim - 1);
  ClipGuess guess;
  guess.rank = head_dim - index;
  constexpr double kPi = 3.14159265358979;
  const double quantile = TailQuantile(1.0 - (guess.rank - 0.5) / head_dim);
  const double density = std::sqrt(2.0 / kPi) * std::exp(-0.5 * quantile * quantile);
  // The mean magnitude of a normal distribution is sigma * sqrt(2 / pi).
  const double sigma = std::sqrt(0.5 * kPi) / head_dim;
  guess.first = static_cast<float>(sigma * quantile);
  guess.step = static_cast<float>(sigma / (head_dim * density));
  return guess;
}

}  // namespace crumb::kernels::cuda
