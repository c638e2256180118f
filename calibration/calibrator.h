// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "calibration/activation_source.h"
#include "common/rotation_file.h"
#include "kernels/quantize.h"

namespace crumb::calibration {

struct CalibrationOptions {
  kernels::Method method = kernels::Method::kCrumb;  // or kOscar
  int positions = 0;                                 // serving context, above 64
  float clip_k = 0.0f;                               // fraction of |y| kept; 0: all
  float clip_v = 0.0f;
  double damp = 0.01;        // added to the diagonal of the normalised query covariance
  int position_blocks = 64;  // means at most, of equally many pages each
};

// Called with the part of the work that is done, 0 to 1.
using CalibrationProgress = std::function<void(double)>;

// The clip ratios a method is published with.
CalibrationOptions DefaultCalibration(kernels::Method method);

// kOscar: one rotation per layer from post-RoPE covariances over all tokens. kCrumb: rotations and
// feedback per KV head, means per position block and mass shifts, for `options.positions`
// positions, from tokens behind the sink. Walks the source two times, three for kCrumb.
// kInvalidArgument: a layer has fewer than 4 head_dim tokens, or a value that is not finite.
absl::StatusOr<RotationFile> Calibrate(ActivationSource& source, const CalibrationOptions& options,
                                       const CalibrationProgress& progress);

// The data-free method `hadamard`, for any number of layers and heads. kInvalidArgument: head_dim
// is no power of two.
absl::StatusOr<RotationFile> HadamardRotations(int head_dim);

}  // namespace crumb::calibration
