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

// Runs body(0) .. body(count - 1), in any order and on any threads, and returns when all are done.
using ParallelFor = std::function<void(int count, const std::function<void(int)>& body)>;

// What values are worth to the model: C per KV head, [kv_heads] of [head_dim, head_dim], of one of
// the shape's layers.
using ValueHessians = std::function<absl::StatusOr<std::vector<Eigen::MatrixXd>>(int layer)>;

struct CalibrationOptions {
  kernels::Method method = kernels::Method::kCrumb;  // or kOscar
  int positions = 0;                                 // serving context, above 64
  float clip_k = 0.0f;                               // fraction of |y| kept; 0: all
  float clip_v = 0.0f;
  double damp = 0.01;            // added to the diagonal of the normalised query covariance
  int position_blocks = 64;      // means at most, of equally many pages each
  ValueHessians value_hessians;  // kCrumb: also feedback for values; empty: none
  ParallelFor parallel_for;      // shares the work over KV heads; empty: all on the calling thread
  std::function<void(const std::string&)> warn;  // told what the file will lack; empty: nobody
};

// Called with the part of the work that is done, 0 to 1.
using CalibrationProgress = std::function<void(double)>;

// The clip ratios a method is published with.
CalibrationOptions DefaultCalibration(kernels::Method method);

// kOscar: one rotation per layer from post-RoPE covariances over all tokens. kCrumb: rotations and
// feedback per KV head, means per position block and mass shifts, for `options.positions`
// positions, from tokens behind the sink. Both: the expected attention error, of 32 windows or
// more. Walks the source three times, for as many layers at once as the source says, and holds the
// statistics of those only. The same source gives the same file, on any number of threads.
// Sequences of less than 384 tokens show neither mass shift nor attention error: a warning.
// kInvalidArgument: a layer has fewer than 4 head_dim tokens, or a value that is not finite.
absl::StatusOr<RotationFile> Calibrate(ActivationSource& source, const CalibrationOptions& options,
                                       const CalibrationProgress& progress);

// The data-free method `hadamard`, for any number of layers and heads. kInvalidArgument: head_dim
// is no power of two.
absl::StatusOr<RotationFile> HadamardRotations(int head_dim);

// The file that rotates nothing and clips nothing. kInvalidArgument as above.
absl::StatusOr<RotationFile> NaiveRotations(int head_dim);

}  // namespace crumb::calibration
