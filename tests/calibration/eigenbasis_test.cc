// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/eigenbasis.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

namespace crumb::calibration {
namespace {

// Returns a covariance whose spectrum falls steeply, like those of queries.
Eigen::MatrixXd SteepCovariance(int dim, unsigned seed) {
  std::srand(seed);
  const Eigen::MatrixXd mix = Eigen::MatrixXd::Random(dim, dim);
  Eigen::VectorXd scale(dim);
  for (int i = 0; i < dim; ++i) scale[i] = std::pow(0.9, i);
  return mix * scale.asDiagonal() * mix.transpose();
}

class EigenbasisTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(HeadDims, EigenbasisTest, testing::Values(64, 128, 256));

TEST_P(EigenbasisTest, IsOrthogonalAndLevelsTheDiagonal) {
  const int dim = GetParam();
  const Eigen::MatrixXd covariance = SteepCovariance(dim, 7);
  const Eigenbasis basis = MakeEigenbasis(covariance);
  const Eigen::MatrixXf stored = basis.rotation.cast<float>();
  const Eigen::MatrixXd product = (stored.transpose() * stored).cast<double>();
  EXPECT_LE((product - Eigen::MatrixXd::Identity(dim, dim)).cwiseAbs().maxCoeff(), 1e-6);
  const Eigen::VectorXd diagonal =
      (basis.rotation.transpose() * covariance * basis.rotation).diagonal();
  const double expected = covariance.trace() / dim;
  EXPECT_LE((diagonal.array() / expected - 1.0).abs().maxCoeff(), 1e-10);
  for (int i = 1; i < dim; ++i) EXPECT_LE(basis.eigenvalues[i - 1], basis.eigenvalues[i]);
}

// R = U'H, where U' has the eigenvectors in bit-reversed order with alternating signs.
TEST_P(EigenbasisTest, IsReorderedEigenvectorsTimesHadamard) {
  const int dim = GetParam();
  const int bits = std::countr_zero(static_cast<unsigned>(dim));
  const Eigen::MatrixXd covariance = SteepCovariance(dim, 8);
  const Eigenbasis basis = MakeEigenbasis(covariance);
  const Eigen::MatrixXd reordered = basis.rotation * HadamardMatrix(dim);  // H is its own inverse
  for (int m = 0; m < dim; ++m) {
    const double sign = std::popcount(static_cast<unsigned>(m)) % 2 == 0 ? 1.0 : -1.0;
    const Eigen::VectorXd u = sign * reordered.col(m);
    // The vector belongs to the BitReverse(m)-th eigenvalue.
    const double value = basis.eigenvalues[BitReverse(m, bits)];
    EXPECT_LE((covariance * u - value * u).norm(), 1e-9 * basis.eigenvalues[dim - 1]);
  }
}

TEST(EigenbasisOnceTest, HadamardIsSymmetricAndItsOwnInverse) {
  const Eigen::MatrixXd matrix = HadamardMatrix(128);
  EXPECT_EQ(matrix, matrix.transpose());
  EXPECT_LE((matrix * matrix - Eigen::MatrixXd::Identity(128, 128)).cwiseAbs().maxCoeff(), 1e-12);
  EXPECT_EQ(BitReverse(1, 7), 64);
  EXPECT_EQ(BitReverse(6, 3), 3);
}

TEST_P(EigenbasisTest, ADualBasisIsTheInverseAndLevelsTheWeights) {
  const int dim = GetParam();
  const Eigen::MatrixXd weights = SteepCovariance(dim, 10), covariance = SteepCovariance(dim, 11);
  const DualBasis basis = MakeDualBasis(weights, covariance, 0.5);
  const Eigen::MatrixXd product = basis.rotation * basis.dual.transpose();
  EXPECT_LE((product - Eigen::MatrixXd::Identity(dim, dim)).cwiseAbs().maxCoeff(), 1e-10);
  const Eigen::VectorXd diagonal = (basis.dual.transpose() * weights * basis.dual).diagonal();
  EXPECT_LE((diagonal.array() / diagonal.mean() - 1.0).abs().maxCoeff(), 1e-9);
  const double trace = (basis.rotation.transpose() * covariance * basis.rotation).trace();
  EXPECT_NEAR(trace, covariance.trace(), 1e-9 * covariance.trace());
}

TEST_P(EigenbasisTest, ADualBasisStretchesByAPowerOfTheCovariance) {
  const int dim = GetParam();
  Eigen::VectorXd c(dim), s(dim);
  for (int i = 0; i < dim; ++i) {
    c[i] = 1.0 + (i * 7) % dim;
    s[i] = 2.0 + (i * 5) % dim;
  }
  const DualBasis basis = MakeDualBasis(c.asDiagonal(), s.asDiagonal(), 0.5);
  const Eigen::MatrixXd metric = basis.rotation * basis.rotation.transpose();
  Eigen::VectorXd expected(dim);
  for (int i = 0; i < dim; ++i) expected[i] = std::pow(s[i] / s.mean() + 0.03, -0.5);
  expected *= s.sum() / expected.dot(s);
  for (int i = 0; i < dim; ++i) {
    EXPECT_NEAR(metric(i, i), expected[i], 1e-9 * expected[i]);
    for (int j = 0; j < i; ++j) EXPECT_NEAR(metric(i, j), 0.0, 1e-9);
  }
}

TEST_P(EigenbasisTest, ADualBasisOfRowsThatAreAlikeInAllDirectionsIsARotation) {
  const int dim = GetParam();
  const Eigen::MatrixXd weights = SteepCovariance(dim, 12);
  for (const double scale : {0.0, 3.0}) {  // rows may be constant
    const DualBasis basis =
        MakeDualBasis(weights, scale * Eigen::MatrixXd::Identity(dim, dim), 0.5);
    const Eigen::MatrixXd product = basis.rotation.transpose() * basis.rotation;
    EXPECT_LE((product - Eigen::MatrixXd::Identity(dim, dim)).cwiseAbs().maxCoeff(), 1e-9);
    const Eigen::VectorXd diagonal = (basis.dual.transpose() * weights * basis.dual).diagonal();
    EXPECT_LE((diagonal.array() / diagonal.mean() - 1.0).abs().maxCoeff(), 1e-9);
  }
}

TEST_P(EigenbasisTest, FeedbackFactorRebuildsTheWeights) {
  const int dim = GetParam();
  const Eigen::MatrixXd covariance = SteepCovariance(dim, 9);
  const Eigen::MatrixXd rotation = MakeEigenbasis(covariance).rotation;
  double gain = 0.0;
  const Eigen::MatrixXd both = FeedbackFactor(covariance, rotation, 0.01, &gain);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < i; ++j) ASSERT_EQ(both(i, j), 0.0);
  }
  const Eigen::MatrixXd factor = both.triangularView<Eigen::StrictlyUpper>();
  EXPECT_LE(factor.cwiseAbs().maxCoeff(), 10.0);
  Eigen::MatrixXd weights = rotation.transpose() * covariance * rotation;
  weights /= weights.diagonal().mean();
  weights.diagonal().array() += 0.01;
  // D = (I + U)^-1 H (I + U)'^-1 must be diagonal, and its mean must be the gain.
  const Eigen::MatrixXd unit = Eigen::MatrixXd::Identity(dim, dim) + factor;
  const Eigen::MatrixXd inverse = unit.inverse();
  const Eigen::MatrixXd diagonal = inverse * weights * inverse.transpose();
  Eigen::MatrixXd rest = diagonal;
  rest.diagonal().setZero();
  EXPECT_LE(rest.cwiseAbs().maxCoeff(), 1e-9);
  EXPECT_GT(diagonal.diagonal().minCoeff(), 0.0);
  EXPECT_LE((diagonal.diagonal() - both.diagonal()).cwiseAbs().maxCoeff(), 1e-9);
  EXPECT_NEAR(gain, diagonal.diagonal().mean() / weights.diagonal().mean(), 1e-9);
  EXPECT_LT(gain, 0.9);
}

TEST(EigenbasisOnceTest, NoQueriesGiveNoFeedback) {
  const Eigen::MatrixXd zero = Eigen::MatrixXd::Zero(64, 64);
  const Eigenbasis basis = MakeEigenbasis(zero);
  const Eigen::MatrixXd factor = FeedbackFactor(zero, basis.rotation, 0.01, nullptr);
  EXPECT_TRUE(factor.isDiagonal(0.0));
  EXPECT_GT(factor.diagonal().minCoeff(), 0.0);
}

}  // namespace
}  // namespace crumb::calibration
