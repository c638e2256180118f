// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/eigenbasis.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace crumb::calibration {

Eigen::MatrixXd HadamardMatrix(int dim) {
  Eigen::MatrixXd matrix(dim, dim);
  const double value = 1.0 / std::sqrt(dim);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      matrix(i, j) = std::popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? value : -value;
    }
  }
  return matrix;
}

int BitReverse(int i, int bits) {
  int reversed = 0;
  for (int bit = 0; bit < bits; ++bit) reversed |= (i >> bit & 1) << (bits - 1 - bit);
  return reversed;
}

Eigenbasis MakeEigenbasis(const Eigen::MatrixXd& covariance) {
  const int dim = static_cast<int>(covariance.rows());
  const int bits = std::countr_zero(static_cast<unsigned>(dim));
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(
      (covariance + covariance.transpose()) / 2);
  const Eigen::MatrixXd mixed = solver.eigenvectors() * HadamardMatrix(dim);
  Eigenbasis basis{Eigen::MatrixXd(dim, dim), solver.eigenvalues()};
  for (int j = 0; j < dim; ++j) basis.rotation.col(j) = mixed.col(dim - 1 - BitReverse(j, bits));
  return basis;
}

namespace {

// Added to the diagonal of a covariance of mean diagonal 1 before it is inverted, so that
// directions of hardly any variance are not stretched without bound.
constexpr double kDualDamp = 0.03;

}  // namespace

DualBasis MakeDualBasis(const Eigen::MatrixXd& weights, const Eigen::MatrixXd& covariance,
                        double whitening) {
  const double mean = covariance.diagonal().mean();
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(
      (covariance + covariance.transpose()) / (mean > 0 ? 2 * mean : 1.0));
  // Rounding may leave an eigenvalue of a covariance slightly below 0.
  Eigen::VectorXd stretch =
      (solver.eigenvalues().array().max(0.0) + kDualDamp).pow(-whitening / 2).matrix();
  const double before = solver.eigenvalues().sum();
  const double after = solver.eigenvalues().dot(stretch.cwiseAbs2());
  if (before > 0) {
    stretch *= std::sqrt(before / after);
  } else {
    stretch.setOnes();  // All rows are alike, and any basis serves them.
  }
  const Eigen::MatrixXd& axes = solver.eigenvectors();
  const Eigen::MatrixXd forth = axes * stretch.asDiagonal() * axes.transpose();
  const Eigen::MatrixXd back = axes * stretch.cwiseInverse().asDiagonal() * axes.transpose();
  const Eigen::MatrixXd rotation = MakeEigenbasis(back * weights * back).rotation;
  return {.rotation = forth * rotation, .dual = back * rotation};
}

Eigen::MatrixXd FeedbackFactor(const Eigen::MatrixXd& covariance, const Eigen::MatrixXd& rotation,
                               double damp, double* gain) {
  const Eigen::Index dim = covariance.rows();
  const Eigen::MatrixXd rotated = rotation.transpose() * covariance * rotation;
  const double mean = rotated.diagonal().mean();
  Eigen::MatrixXd weights = mean > 0 ? Eigen::MatrixXd(rotated / mean)
                                     : Eigen::MatrixXd(Eigen::MatrixXd::Identity(dim, dim));
  weights.diagonal().array() += damp;
  // H = (I + U) D (I + U)' is the Cholesky factorization from the last channel backwards.
  const Eigen::MatrixXd reversed = weights.reverse();
  const Eigen::LLT<Eigen::MatrixXd> cholesky(reversed);
  const Eigen::MatrixXd lower = cholesky.matrixL();
  Eigen::MatrixXd upper = lower.reverse();
  const Eigen::VectorXd diagonal = upper.diagonal();
  if (gain != nullptr) *gain = diagonal.array().square().mean() / weights.diagonal().mean();
  for (Eigen::Index j = 0; j < dim; ++j) upper.col(j) /= diagonal[j];
  upper.diagonal() = diagonal.array().square();
  return upper.triangularView<Eigen::Upper>();
}

}  // namespace crumb::calibration
