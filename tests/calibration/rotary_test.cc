// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/rotary.h"

#include <gtest/gtest.h>

#include <cmath>

namespace crumb::calibration {
namespace {

constexpr int kDim = 16;

// Half of the channels are rotated, so that there are both kinds of pairs.
RotaryPairs Pairs() { return HalfSplitPairs(kDim, {1.0f, 0.3f, 0.01f, 0.0002f}); }

// Returns a row at position t by the definition of RoPE.
Eigen::VectorXd TurnTo(int t, const Eigen::VectorXd& row) {
  const double frequencies[] = {1.0f, 0.3f, 0.01f, 0.0002f};
  Eigen::VectorXd out = row;
  for (int i = 0; i < 4; ++i) {
    const double angle = frequencies[i] * t;
    out[i] = row[i] * std::cos(angle) - row[i + 4] * std::sin(angle);
    out[i + 4] = row[i + 4] * std::cos(angle) + row[i] * std::sin(angle);
  }
  return out;
}

TEST(RotaryTest, EveryChannelIsInOnePair) {
  const RotaryPairs pairs = Pairs();
  std::vector<int> seen(kDim, 0);
  for (const int channel : pairs.first) ++seen[channel];
  for (const int channel : pairs.second) ++seen[channel];
  EXPECT_EQ(seen, std::vector<int>(kDim, 1));
}

TEST(RotaryTest, UndoTurnsBack) {
  std::srand(1);
  const Eigen::MatrixXd rows = Eigen::MatrixXd::Random(6, kDim);
  Eigen::MatrixXf turned(6, kDim);
  for (int r = 0; r < 6; ++r) {
    turned.row(r) = TurnTo(100 + r / 2, rows.row(r).transpose()).cast<float>().transpose();
  }
  const RotaryPairs pairs = Pairs();
  PositionRotations(pairs, 98, 5).InverseRotate(2, 2, turned);
  EXPECT_LE((turned.cast<double>() - rows).cwiseAbs().maxCoeff(), 2e-6);
}

// Compares means over a serving context with the mean of the rows rotated to every position.
TEST(RotaryTest, MomentsExtendToAnyPositions) {
  std::srand(2);
  const Eigen::MatrixXd rows = Eigen::MatrixXd::Random(5, kDim);
  const Eigen::VectorXd mean = rows.colwise().mean().transpose();
  const Eigen::MatrixXd moment = rows.transpose() * rows / 5.0;
  for (const auto& [begin, end] : {std::pair{64, 65}, std::pair{64, 1000}, std::pair{500, 4096}}) {
    Eigen::VectorXd direct_mean = Eigen::VectorXd::Zero(kDim);
    Eigen::MatrixXd direct_moment = Eigen::MatrixXd::Zero(kDim, kDim);
    for (int t = begin; t < end; ++t) {
      for (int r = 0; r < 5; ++r) {
        const Eigen::VectorXd x = TurnTo(t, rows.row(r).transpose());
        direct_mean += x / (5.0 * (end - begin));
        direct_moment += x * x.transpose() / (5.0 * (end - begin));
      }
    }
    EXPECT_LE((MeanOverPositions(Pairs(), mean, begin, end) - direct_mean).norm(), 1e-10);
    EXPECT_LE((MomentOverPositions(Pairs(), moment, begin, end) - direct_moment).norm(), 1e-10);
  }
}

}  // namespace
}  // namespace crumb::calibration
