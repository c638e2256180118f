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

// A basis that need not be orthogonal: a row x is stored as y = x R and read as y Q', so queries
// are q Q.
struct DualBasis {
  Eigen::MatrixXd rotation;  // R
  Eigen::MatrixXd dual;      // Q, with R Q' = I
};

// Returns the basis for rows of this covariance, S, whose error e costs e C e' with C the
// `weights`: R R' is S^-whitening up to a factor, with S damped. The factor keeps the trace of S,
// and diag(Q' C Q) is constant. REQUIRES: the matrices are symmetric, and their size is a power of
// two.
DualBasis MakeDualBasis(const Eigen::MatrixXd& weights, const Eigen::MatrixXd& covariance,
                        double whitening);

// Returns the feedback factor U and the weights D of the decomposition (I + U) D (I + U)' of the
// matrix R' C R / mean(diag) + damp I: U above the diagonal, D on it, 0 below it. By U the rounding
// error of a channel is propagated to the channels that are quantized later. `rotation` is R, or
// the dual Q where there is one: an error of y costs as much as its image y Q'. If `gain` is not
// null, it is set to the weighted error with feedback over that without, mean(D) / mean(diag).
Eigen::MatrixXd FeedbackFactor(const Eigen::MatrixXd& covariance, const Eigen::MatrixXd& rotation,
                               double damp, double* gain);

}  // namespace crumb::calibration
