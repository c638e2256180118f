// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <vector>

// Rotary position embedding (RoPE) in calibration: its inverse at a position, and averages over the
// positions of a serving context.
namespace crumb::calibration {

// Channels first[i] and second[i] are rotated together by position * frequency[i]. Every channel is
// in exactly one pair; pairs without RoPE have frequency 0.
struct RotaryPairs {
  std::vector<int> first;
  std::vector<int> second;
  std::vector<double> frequency;  // radians per token
};

// Pairs channel i with channel i + n for the n given frequencies; later channels are not rotated.
RotaryPairs HalfSplitPairs(int head_dim, const std::vector<float>& frequencies);

// The rotations of positions [begin, begin + count), computed once for all heads. `pairs` must
// outlive this. Immutable, so thread-safe.
class PositionRotations {
 public:
  PositionRotations(const RotaryPairs& pairs, int begin, int count);

  // Inverse-rotates rows [rows, head_dim] to position 0. Row r is at position
  // begin + first + r / heads.
  void InverseRotate(int first, int heads, Eigen::MatrixXf& rows) const;

 private:
  const RotaryPairs& pairs_;
  Eigen::MatrixXf cosine_;  // [positions, pairs]
  Eigen::MatrixXf sine_;
};

// Returns the mean over positions [begin, end) of a row whose mean before RoPE is `mean`.
Eigen::VectorXd MeanOverPositions(const RotaryPairs& pairs, const Eigen::VectorXd& mean, int begin,
                                  int end);

// Returns the mean over positions [begin, end) of x x' after RoPE; `moment` is its mean before
// RoPE.
Eigen::MatrixXd MomentOverPositions(const RotaryPairs& pairs, const Eigen::MatrixXd& moment,
                                    int begin, int end);

}  // namespace crumb::calibration
