// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>

// Bases for quantization from a covariance, in double precision.
namespace crumb::calibration {

// The normalised Sylvester matrix, H[i, j] = (-1)^popcount(i & j) / sqrt(dim); dim a power of two.
Eigen::MatrixXd HadamardMatrix(int dim);

// The lowest `bits` bits of i in reverse order.
int BitReverse(int i, int bits);

struct Eigenbasis {
  Eigen::MatrixXd rotation;     // R = U H P: eigenvectors, Hadamard, columns in bit-reversed order
  Eigen::VectorXd eigenvalues;  // ascending
};

// `covariance` is symmetric, its size a power of two. diag(R' C R) is constant, trace(C) / dim.
Eigenbasis MakeEigenbasis(const Eigen::MatrixXd& covariance);

// What rounding errors add to later channels: U, strictly upper, of
// R' C R / mean(diag) + damp I = (I + U) D (I + U)'. `gain`, when not null, becomes the weighted
// error with feedback over that without, mean(D) / mean(diag).
Eigen::MatrixXd FeedbackFactor(const Eigen::MatrixXd& covariance, const Eigen::MatrixXd& rotation,
                               double damp, double* gain);

}  // namespace crumb::calibration
