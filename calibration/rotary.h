// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <vector>

// Rotary position embedding as calibration sees it: undone by position, and averaged over the
// positions of a serving context.
namespace crumb::calibration {

// Channels first[i] and second[i] turn together by position * frequency[i]. Every channel is in
// exactly one pair; pairs without RoPE have frequency 0.
struct RotaryPairs {
  std::vector<int> first;
  std::vector<int> second;
  std::vector<double> frequency;  // radians per token
};

// Channel i and i + 2n / 2 pair up for the n given frequencies, channels behind them do not turn.
RotaryPairs HalfSplitPairs(int head_dim, const std::vector<float>& frequencies);

// The turns of positions [begin, begin + count), worked out once for all heads. Immutable, so
// thread-safe. Borrows `pairs`.
class RotaryTurns {
 public:
  RotaryTurns(const RotaryPairs& pairs, int begin, int count);

  // Turns rows [rows, head_dim] back to position 0; row r is at the position numbered
  // first + r / heads of those above.
  void Undo(int first, int heads, Eigen::MatrixXf& rows) const;

 private:
  const RotaryPairs& pairs_;
  Eigen::MatrixXf cosine_;  // [positions, pairs]
  Eigen::MatrixXf sine_;
};

// The mean over positions [begin, end) of a row whose mean before RoPE is `mean`.
Eigen::VectorXd MeanOverPositions(const RotaryPairs& pairs, const Eigen::VectorXd& mean, int begin,
                                  int end);

// The mean over positions [begin, end) of x x' after RoPE, `moment` being its mean before.
Eigen::MatrixXd MomentOverPositions(const RotaryPairs& pairs, const Eigen::MatrixXd& moment,
                                    int begin, int end);

}  // namespace crumb::calibration
