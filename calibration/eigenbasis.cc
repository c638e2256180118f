// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/eigenbasis.h"

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
  return upper.triangularView<Eigen::StrictlyUpper>();
}

}  // namespace crumb::calibration
