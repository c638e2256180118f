// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>

// The bases in which rows are quantized, computed from covariances in double precision.
namespace crumb::calibration {

// Returns the normalised Sylvester matrix, H[i, j] = (-1)^popcount(i & j) / sqrt(dim). REQUIRES:
// dim is a power of two.
Eigen::MatrixXd HadamardMatrix(int dim);

// Returns the lowest `bits` bits of i in reverse order.
int BitReverse(int i, int bits);

struct Eigenbasis {
  Eigen::MatrixXd rotation;     // R = U H P: eigenvectors, Hadamard, columns in bit-reversed order
  Eigen::VectorXd eigenvalues;  // ascending
};

// Returns the basis in which all channels have equal variance: diag(R' C R) is trace(C) / dim.
// REQUIRES: `covariance` is symmetric, and its size is a power of two.
Eigenbasis MakeEigenbasis(const Eigen::MatrixXd& covariance);

// Returns the feedback factor U, by which the rounding error of a channel is propagated to the
// channels that are quantized later: the strictly upper matrix of R' C R / mean(diag) + damp I = (I
// + U) D (I + U)'. If `gain` is not null, it is set to the weighted error with feedback over that
// without, mean(D) / mean(diag).
Eigen::MatrixXd FeedbackFactor(const Eigen::MatrixXd& covariance, const Eigen::MatrixXd& rotation,
                               double damp, double* gain);

}  // namespace crumb::calibration
