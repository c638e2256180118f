// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/head_moments.h"

#include <algorithm>
#include <string>

#include "common/status_macros.h"
#include "kernels/bf16.h"

namespace crumb::calibration {
namespace {

// Heads [first, first + count) of tokens [begin, tokens), rows [tokens, heads, head_dim].
absl::StatusOr<Eigen::MatrixXf> Rows(const char* tensor, const SequenceActivations& sequence,
                                     const kernels::Bf16* rows, int heads, int head_dim, int first,
                                     int count, int begin) {
  const int tokens = std::max(0, sequence.tokens - begin);
  Eigen::MatrixXf out(tokens * count, head_dim);
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < count; ++h) {
      const kernels::Bf16* row =
          rows + (static_cast<int64_t>(begin + t) * heads + first + h) * head_dim;
      for (int i = 0; i < head_dim; ++i) out(t * count + h, i) = kernels::Bf16ToFloat(row[i]);
    }
  }
  if (!out.allFinite()) {
    return absl::InvalidArgumentError("layer " + std::to_string(sequence.layer) + ": " + tensor +
                                      " holds a value that is not finite");
  }
  return out;
}

}  // namespace

absl::StatusOr<Eigen::MatrixXf> QueryRows(const ModelShape& shape,
                                          const SequenceActivations& sequence, int kv_head,
                                          int begin) {
  const int group = shape.q_heads / shape.kv_heads;
  return Rows("q", sequence, sequence.q, shape.q_heads, shape.head_dim, kv_head * group, group,
              begin);
}

absl::StatusOr<Eigen::MatrixXf> KeyRows(const ModelShape& shape,
                                        const SequenceActivations& sequence, int kv_head,
                                        int begin) {
  return Rows("k", sequence, sequence.k, shape.kv_heads, shape.head_dim, kv_head, 1, begin);
}

absl::StatusOr<Eigen::MatrixXf> ValueRows(const ModelShape& shape,
                                          const SequenceActivations& sequence, int kv_head,
                                          int begin) {
  return Rows("v", sequence, sequence.v, shape.kv_heads, shape.head_dim, kv_head, 1, begin);
}

HeadMoments::HeadMoments(int head_dim)
    : query_moment_(Eigen::MatrixXd::Zero(head_dim, head_dim)),
      key_sum_(Eigen::VectorXd::Zero(head_dim)),
      value_sum_(Eigen::VectorXd::Zero(head_dim)) {}

absl::Status HeadMoments::Add(const ModelShape& shape, const RotaryPairs& pairs,
                              const SequenceActivations& sequence, int kv_head, int begin) {
  CRUMB_ASSIGN_OR_RETURN(Eigen::MatrixXf q, QueryRows(shape, sequence, kv_head, begin));
  CRUMB_ASSIGN_OR_RETURN(Eigen::MatrixXf k, KeyRows(shape, sequence, kv_head, begin));
  CRUMB_ASSIGN_OR_RETURN(const Eigen::MatrixXf v, ValueRows(shape, sequence, kv_head, begin));
  UndoRotary(pairs, begin, shape.q_heads / shape.kv_heads, q);
  UndoRotary(pairs, begin, 1, k);
  query_moment_ += (q.transpose() * q).cast<double>();
  key_sum_ += k.cast<double>().colwise().sum().transpose();
  value_sum_ += v.cast<double>().colwise().sum().transpose();
  queries_ += q.rows();
  tokens_ += k.rows();
  return absl::OkStatus();
}

}  // namespace crumb::calibration
