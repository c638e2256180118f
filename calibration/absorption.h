// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <optional>
#include <vector>

#include "calibration/linear_weight.h"
#include "common/rotation_file.h"

// Folding R_V into the projections around attention, so that V arrives rotated and nothing is left
// to do at run time. With v = W_v x + b and y = sum over query heads of W_o,h o_h, o_h a mean of
// v: W_v' = R' W_v, b' = R' b, W_o,h' = W_o,h R give the same y.
namespace crumb::calibration {

// One layer's projections. All borrow nothing.
struct ValuePath {
  RowMajorF v_weight;                     // [kv_heads * head_dim, hidden]
  std::optional<Eigen::VectorXf> v_bias;  // [kv_heads * head_dim]
  RowMajorF o_weight;                     // [hidden, q_heads * head_dim]
};

// Rotates in place. `rotations` [kv_heads] are [head_dim, head_dim], y = x R; query head h reads KV
// head h / (q_heads / kv_heads).
void AbsorbRotation(const std::vector<Eigen::MatrixXf>& rotations, ValuePath& path);

// The largest relative difference over query heads of W_o,h (W_v x + b) between the two, root mean
// square over random x. `head_dim` divides both paths' heads.
double ProductError(const ValuePath& before, const ValuePath& after, int head_dim);

// The rotation file for a model with R_V folded in: no rotation_v, mean_v in the rotated basis
// (mu_V R_V), v_basis rotated; codes come out the same. kInvalidArgument: it has no rotation_v.
absl::StatusOr<RotationFile> AbsorbedRotationFile(const RotationFile& file);

}  // namespace crumb::calibration
