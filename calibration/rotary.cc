// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/rotary.h"

#include <cmath>
#include <complex>

namespace crumb::calibration {
namespace {

using Complex = std::complex<double>;

// Returns the mean over t in [begin, end) of e^{i angle t}.
Complex MeanRotation(double angle, int begin, int end) {
  const int count = end - begin;
  const double reduced = std::remainder(angle, 2 * M_PI);  // because positions are integers
  const double half = reduced / 2;
  const Complex centre = std::polar(1.0, reduced * (begin + (count - 1) / 2.0));
  // The sum is a geometric series: sin(n half) / sin(half) around its middle term.
  if (std::abs(half) < 1e-12) return centre;
  return centre * (std::sin(count * half) / (count * std::sin(half)));
}

}  // namespace

RotaryPairs HalfSplitPairs(int head_dim, const std::vector<float>& frequencies) {
  RotaryPairs pairs;
  const auto add = [&pairs](int begin, int half, const auto& frequency_of) {
    for (int i = 0; i < half; ++i) {
      pairs.first.push_back(begin + i);
      pairs.second.push_back(begin + half + i);
      pairs.frequency.push_back(frequency_of(i));
    }
  };
  const int turning = static_cast<int>(frequencies.size());
  add(0, turning, [&](int i) { return static_cast<double>(frequencies[i]); });
  add(2 * turning, head_dim / 2 - turning, [](int) { return 0.0; });
  return pairs;
}

PositionRotations::PositionRotations(const RotaryPairs& pairs, int begin, int count)
    : pairs_(pairs), cosine_(count, pairs.first.size()), sine_(count, pairs.first.size()) {
  for (Eigen::Index pair = 0; pair < cosine_.cols(); ++pair) {
    if (pairs.frequency[pair] == 0.0) continue;  // InverseRotate skips the pair
    for (int i = 0; i < count; ++i) {
      const double angle = pairs.frequency[pair] * static_cast<double>(begin + i);
      cosine_(i, pair) = static_cast<float>(std::cos(angle));
      sine_(i, pair) = static_cast<float>(std::sin(angle));
    }
  }
}

void PositionRotations::InverseRotate(int first, int heads, Eigen::MatrixXf& rows) const {
  for (Eigen::Index pair = 0; pair < cosine_.cols(); ++pair) {
    if (pairs_.frequency[pair] == 0.0) continue;
    auto a = rows.col(pairs_.first[pair]);
    auto b = rows.col(pairs_.second[pair]);
    for (Eigen::Index r = 0; r < rows.rows(); ++r) {
      const float cosine = cosine_(first + r / heads, pair), sine = sine_(first + r / heads, pair);
      const float x = a[r], y = b[r];
      a[r] = x * cosine + y * sine;
      b[r] = y * cosine - x * sine;
    }
  }
}

Eigen::VectorXd MeanOverPositions(const RotaryPairs& pairs, const Eigen::VectorXd& mean, int begin,
                                  int end) {
  Eigen::VectorXd out(mean.size());
  for (size_t i = 0; i < pairs.first.size(); ++i) {
    const Complex z = Complex(mean[pairs.first[i]], mean[pairs.second[i]]) *
                      MeanRotation(pairs.frequency[i], begin, end);
    out[pairs.first[i]] = z.real();
    out[pairs.second[i]] = z.imag();
  }
  return out;
}

Eigen::MatrixXd MomentOverPositions(const RotaryPairs& pairs, const Eigen::MatrixXd& moment,
                                    int begin, int end) {
  Eigen::MatrixXd out(moment.rows(), moment.cols());
  for (size_t p = 0; p < pairs.first.size(); ++p) {
    const int a = pairs.first[p], b = pairs.second[p];
    for (size_t q = 0; q < pairs.first.size(); ++q) {
      const int c = pairs.first[q], d = pairs.second[q];
      // With z = x_a + i x_b and w = x_c + i x_d, these are the means of z conj(w) and of z w.
      Complex conjugate(moment(a, c) + moment(b, d), moment(b, c) - moment(a, d));
      Complex plain(moment(a, c) - moment(b, d), moment(b, c) + moment(a, d));
      conjugate *= MeanRotation(pairs.frequency[p] - pairs.frequency[q], begin, end);
      plain *= MeanRotation(pairs.frequency[p] + pairs.frequency[q], begin, end);
      out(a, c) = (conjugate.real() + plain.real()) / 2;
      out(b, d) = (conjugate.real() - plain.real()) / 2;
      out(b, c) = (conjugate.imag() + plain.imag()) / 2;
      out(a, d) = (plain.imag() - conjugate.imag()) / 2;
    }
  }
  return out;
}

}  // namespace crumb::calibration
