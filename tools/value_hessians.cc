// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/value_hessians.h"

#include "common/status_macros.h"
#include "fmt/format.h"
#include "tools/attention_weights.h"

namespace crumb::tools {
namespace {

absl::StatusOr<std::vector<Eigen::MatrixXd>> HessiansOf(const AttentionWeights& weights,
                                                        int layer) {
  CRUMB_ASSIGN_OR_RETURN(const auto projection, weights.OutputProjection(layer));
  CRUMB_ASSIGN_OR_RETURN(const auto linear, projection.Decode());
  weights.Release(projection);
  const int dim = weights.head_dim(), group = weights.q_heads() / weights.kv_heads();
  std::vector<Eigen::MatrixXd> hessians;
  for (int head = 0; head < weights.kv_heads(); ++head) {
    Eigen::MatrixXf sum = Eigen::MatrixXf::Zero(dim, dim);
    for (int g = 0; g < group; ++g) {
      const auto columns = linear.values.middleCols((head * group + g) * dim, dim);
      sum.noalias() += columns.transpose() * columns;
    }
    hessians.push_back(sum.cast<double>());
  }
  return hessians;
}

}  // namespace

absl::StatusOr<calibration::ValueHessians> OutputProjectionHessians(
    const std::string& model, const calibration::ModelShape& shape) {
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<AttentionWeights> weights, AttentionWeights::Open(model));
  if (weights->head_dim() != shape.head_dim || weights->kv_heads() != shape.kv_heads ||
      weights->q_heads() != shape.q_heads || weights->layers() < shape.layers) {
    return absl::InvalidArgumentError(fmt::format(
        "{}/config.json: {} layers, {} query heads, {} KV heads, head_dim {}; the activations have "
        "{}, {}, {}, {}",
        model, weights->layers(), weights->q_heads(), weights->kv_heads(), weights->head_dim(),
        shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim));
  }
  // Missing weights show before the work begins.
  for (int layer = 0; layer < shape.layers; ++layer) {
    CRUMB_RETURN_IF_ERROR(weights->OutputProjection(shape.LayerId(layer)).status());
  }
  return [weights, ids = shape.layer_ids](int layer) {
    return HessiansOf(*weights, ids.empty() ? layer : ids[layer]);
  };
}

}  // namespace crumb::tools
