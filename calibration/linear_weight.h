// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tensor.h"

namespace crumb::calibration {

using RowMajorF = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// A linear layer's weight in f32, and how its checkpoint stores it: BF16, F16, F32, or F8_E4M3 with
// one scale per output channel or one for all.
struct LinearWeight {
  std::string name;
  std::string dtype;
  std::string scale_dtype;  // empty: no scales
  Eigen::Index scales = 0;  // 1, or as many as rows
  RowMajorF values;         // [out, in], with the scales applied
};

// The bytes of a weight, as many as it was read from.
struct EncodedWeight {
  std::vector<std::byte> weight;
  std::vector<std::byte> scale;
};

// OK when `scale` has one value, or one for each row of `weight`.
absl::Status CheckScale(const RawTensor& weight, const RawTensor& scale);

// `scale` is null for weights without. kInvalidArgument names file and tensor: another dtype, FP8
// scales per block, FP8 without scales, a value that is not finite.
absl::StatusOr<LinearWeight> DecodeWeight(const RawTensor& weight, const RawTensor* scale);

// In the same dtype; FP8 gets new scales, largest magnitude / 448. kInvalidArgument: a value that
// F16 cannot hold.
absl::StatusOr<EncodedWeight> EncodeWeight(const LinearWeight& weight);

}  // namespace crumb::calibration
