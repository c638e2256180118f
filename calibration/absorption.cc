// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/absorption.h"

#include <algorithm>
#include <random>

namespace crumb::calibration {
namespace {

constexpr int kProbes = 16;

Eigen::MatrixXf RandomInputs(Eigen::Index rows) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  return Eigen::MatrixXf::NullaryExpr(rows, kProbes, [&] { return normal(random); });
}

// What the value projection makes of the inputs, [kv_heads * head_dim, probes].
Eigen::MatrixXf Values(const ValuePath& path, const Eigen::MatrixXf& inputs) {
  Eigen::MatrixXf values = path.v_weight * inputs;
  if (path.v_bias) values.colwise() += *path.v_bias;
  return values;
}

}  // namespace

void AbsorbRotation(const std::vector<Eigen::MatrixXf>& rotations, ValuePath& path) {
  const Eigen::Index dim = rotations.front().rows();
  const auto kv_heads = static_cast<Eigen::Index>(rotations.size());
  const Eigen::Index q_heads = path.o_weight.cols() / dim;
  for (Eigen::Index head = 0; head < kv_heads; ++head) {
    const Eigen::MatrixXf turned = rotations[head].transpose();
    path.v_weight.middleRows(head * dim, dim) =
        (turned * path.v_weight.middleRows(head * dim, dim)).eval();
    if (path.v_bias) {
      path.v_bias->segment(head * dim, dim) =
          (turned * path.v_bias->segment(head * dim, dim)).eval();
    }
  }
  for (Eigen::Index head = 0; head < q_heads; ++head) {
    const Eigen::MatrixXf& rotation = rotations[head / (q_heads / kv_heads)];
    path.o_weight.middleCols(head * dim, dim) =
        (path.o_weight.middleCols(head * dim, dim) * rotation).eval();
  }
}

double ProductError(const ValuePath& before, const ValuePath& after, int head_dim) {
  const Eigen::MatrixXf inputs = RandomInputs(before.v_weight.cols());
  const Eigen::MatrixXf values = Values(before, inputs), rotated = Values(after, inputs);
  const Eigen::Index q_heads = before.o_weight.cols() / head_dim;
  const Eigen::Index group = q_heads / (before.v_weight.rows() / head_dim);
  double most = 0.0;
  for (Eigen::Index head = 0; head < q_heads; ++head) {
    const Eigen::Index kv_row = head / group * head_dim, column = head * head_dim;
    const Eigen::MatrixXf expected =
        before.o_weight.middleCols(column, head_dim) * values.middleRows(kv_row, head_dim);
    const Eigen::MatrixXf got =
        after.o_weight.middleCols(column, head_dim) * rotated.middleRows(kv_row, head_dim);
    most = std::max(most, static_cast<double>((got - expected).norm()) /
                              std::max(static_cast<double>(expected.norm()), 1e-30));
  }
  return most;
}

absl::StatusOr<RotationFile> AbsorbedRotationFile(const RotationFile& file) {
  if (file.rotation_v.empty()) {
    return absl::InvalidArgumentError(file.v_basis == "model"
                                          ? "it does not rotate V: there is nothing to absorb"
                                          : "its R_V is absorbed already");
  }
  RotationFile absorbed = file;
  const int64_t dim = file.head_dim;
  for (int64_t head = 0; head < static_cast<int64_t>(file.mean_v.size()) / dim; ++head) {
    const Eigen::Map<const RowMajorF> rotation(&file.rotation_v[head * dim * dim], dim, dim);
    const Eigen::Map<const Eigen::VectorXf> mean(&file.mean_v[head * dim], dim);
    Eigen::Map<Eigen::VectorXf>(&absorbed.mean_v[head * dim], dim) =
        (rotation.cast<double>().transpose() * mean.cast<double>()).cast<float>();
  }
  absorbed.rotation_v.clear();
  absorbed.covariance_v.clear();
  absorbed.v_basis = "rotated";
  return absorbed;
}

}  // namespace crumb::calibration
