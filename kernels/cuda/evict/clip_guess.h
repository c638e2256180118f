// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

// Where the search for a row's clip threshold begins. Rows after rotation are near to normal, so
// the guesses are a normal distribution's; other rows take longer and find the same.
namespace crumb::kernels::cuda {

struct ClipGuess {
  int rank = 0;        // the threshold is the rank-th largest magnitude; 0: no clip
  float first = 0.0f;  // the first guess is this times the row's sum of magnitudes
  float step = 0.0f;   // from one magnitude to the next near the guess, times that sum
};

// The x that |y| / sigma of normal y stays under with this probability.
inline float TailQuantile(double probability) {
  double low = 0.0, high = 6.0;
  for (int i = 0; i < 40; ++i) {
    const double middle = 0.5 * (low + high);
    (std::erf(middle / std::sqrt(2.0)) < probability ? low : high) = middle;
  }
  return static_cast<float>(low);
}

// clip: fraction of magnitudes kept; <= 0: no clip.
inline ClipGuess GuessClip(float clip, int head_dim) {
  if (clip <= 0.0f) return {};
  const int index = std::min(static_cast<int>(clip * static_cast<float>(head_dim)), head_dim - 1);
  ClipGuess guess;
  guess.rank = head_dim - index;
  constexpr double kPi = 3.14159265358979;
  const double quantile = TailQuantile(1.0 - (guess.rank - 0.5) / head_dim);
  const double density = std::sqrt(2.0 / kPi) * std::exp(-0.5 * quantile * quantile);
  // The mean magnitude is sigma times sqrt(2 / pi).
  const double sigma = std::sqrt(0.5 * kPi) / head_dim;
  guess.first = static_cast<float>(sigma * quantile);
  guess.step = static_cast<float>(sigma / (head_dim * density));
  return guess;
}

}  // namespace crumb::kernels::cuda
