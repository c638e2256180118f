// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calibration/activation_source.h"
#include "common/rotation_file.h"
#include "kernels/quantize.h"

namespace crumb::calibration {

// Runs body(0) to body(count - 1), in any order and on any threads, and returns when all have
// returned.
using ParallelFor = std::function<void(int count, const std::function<void(int)>& body)>;

// Returns the Hessian of the layer's output error with respect to values, C per KV head: [kv_heads]
// matrices [head_dim, head_dim].
using ValueHessians = std::function<absl::StatusOr<std::vector<Eigen::MatrixXd>>(int layer)>;

struct CalibrationOptions {
  kernels::Method method = kernels::Method::kCrumb;  // kCrumb or kOscar
  int positions = 0;                                 // tokens of the serving context, above 64
  float clip_k = 0.0f;  // fraction of |y| inside the quantization range; 0: all
  float clip_v = 0.0f;
  double damp = 0.01;  // added to the diagonal of the normalised query covariance
  // kCrumb: R R' is S^-whitening up to a factor, with S the covariance of a head's keys or values,
  // of values only with `value_hessians`. Rows then keep their inner product with themselves in the
  // metric of their errors' weights. From 0 to 1; 0: R is orthogonal.
  double whitening_k = 0.0;
  double whitening_v = 0.0;
  // kCrumb with whitening_k: this times the mean of the query covariance's diagonal is added to all
  // of its diagonal for the weights of keys' errors. The queries that attend a key are spread more
  // evenly than all queries.
  double query_floor = 0.0;
  int position_blocks = 64;      // most means per head, each for equally many pages
  ValueHessians value_hessians;  // kCrumb: weights of values' errors; empty: no feedback
  ParallelFor parallel_for;      // distributes KV heads over threads; empty: one thread
  // Called with a message if the file will lack some figures. May be empty.
  std::function<void(const std::string&)> warn;
};

// Called with the fraction of the work that is done, 0 to 1.
using CalibrationProgress = std::function<void(double)>;

// Returns a method's published clip ratios, and for kCrumb the exponents of quality/methods.md.
CalibrationOptions DefaultCalibration(kernels::Method method);

// Makes a rotation file. kOscar computes one rotation per layer from post-RoPE covariances over all
// tokens. kCrumb computes rotations and feedback per KV head, means per position block and mass
// shifts for `options.positions` positions, from the tokens behind the sink. Both add the expected
// attention error if there are 32 windows or more. Calibration walks the source three times, or
// twice where it whitens values, for source.layers_per_walk() layers at once, and holds the
// statistics of those layers only. The same source gives the same file with any number of threads.
// Sequences of fewer than 384 tokens yield neither mass shift nor attention error, which
// `options.warn` reports. kInvalidArgument: a layer has fewer than 4 head_dim tokens, a value is
// not finite, or an option is out of its range.
absl::StatusOr<RotationFile> Calibrate(ActivationSource& source, const CalibrationOptions& options,
                                       const CalibrationProgress& progress);

// Returns the file of the data-free method `hadamard`, for any number of layers and heads.
// kInvalidArgument: head_dim is no power of two.
absl::StatusOr<RotationFile> HadamardRotations(int head_dim);

// Returns the file that neither rotates nor clips. kInvalidArgument: head_dim is no power of two.
absl::StatusOr<RotationFile> NaiveRotations(int head_dim);

}  // namespace crumb::calibration
