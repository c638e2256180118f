// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/rotation_file.h"
#include "common/tensor.h"

namespace crumb::calibration {

using RowMajorF = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// A linear layer's weight in f32, and how its checkpoint stores it: BF16, F16, F32, or F8_E4M3 with
// one scale per output channel or one for all.
struct LinearWeight {
  std::string name;
  std::string dtype;
  std::string scale_dtype;  // empty if there are no scales
  Eigen::Index scales = 0;  // 1, or as many as rows
  RowMajorF values;         // [out, in], with the scales applied
};

// The bytes of a weight and its scales, as many as were read.
struct EncodedWeight {
  std::vector<std::byte> weight;
  std::vector<std::byte> scale;
};

// Returns OK if `scale` has one value, or one for each row of `weight`.
absl::Status CheckScale(const RawTensor& weight, const RawTensor& scale);

// `scale` is null for weights without scales. kInvalidArgument names file and tensor: the dtype is
// not supported, FP8 has scales per block or none, or a value is not finite.
absl::StatusOr<LinearWeight> DecodeWeight(const RawTensor& weight, const RawTensor* scale);

// Encodes in the same dtype. FP8 gets new scales: the largest magnitude / 448. kInvalidArgument:
// F16 cannot represent a value.
absl::StatusOr<EncodedWeight> EncodeWeight(const LinearWeight& weight);

// The functions below fold R_V into the projections around attention, so that V is already rotated
// and needs no rotation at run time. With v = W_v x + b and y = sum over query heads of W_o,h o_h,
// where o_h is a mean of v: W_v' = R' W_v, b' = R' b and W_o,h' = W_o,h Q give the same y;
// Q is the dual of R, R Q' = I, and R itself where that is orthogonal.

// The projections of one layer.
struct ValuePath {
  RowMajorF v_weight;                     // [kv_heads * head_dim, hidden]
  std::optional<Eigen::VectorXf> v_bias;  // [kv_heads * head_dim]
  RowMajorF o_weight;                     // [hidden, q_heads * head_dim]
};

// Folds `rotations` into `path`. They are [kv_heads] matrices R [head_dim, head_dim] with y = x R,
// `duals` their Q; query head h attends KV head h / (q_heads / kv_heads).
void AbsorbRotation(const std::vector<Eigen::MatrixXf>& rotations,
                    const std::vector<Eigen::MatrixXf>& duals, ValuePath& path);

// Returns the largest relative difference, over query heads, of W_o,h (W_v x + b) between two
// paths: the root mean square over random x.
double ProductError(const ValuePath& before, const ValuePath& after, int head_dim);

// Returns the rotation file for a model with R_V folded in. It has no rotation_v and dual_v, mean_v
// is in the rotated basis (mu_V R_V), and v_basis is "rotated"; pages get the same codes as before.
// If R_V has a dual, it has no attention_error either, which is a ratio of norms in the model's
// basis.
// kInvalidArgument: `file` has no rotation_v.
absl::StatusOr<RotationFile> AbsorbedRotationFile(const RotationFile& file);

}  // namespace crumb::calibration
