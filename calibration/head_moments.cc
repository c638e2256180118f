// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/head_moments.h"

#include <algorithm>
#include <string>

#include "common/status_macros.h"
#include "kernels/bf16.h"

namespace crumb::calibration {
namespace {

// Tokens per block: a block of 8 query heads of 128 channels takes 8 MiB in f32.
constexpr int kBlockTokens = 2048;

// Returns heads [first, first + count) of tokens [begin, begin + tokens) of [tokens, heads,
// head_dim].
absl::StatusOr<Eigen::MatrixXf> Rows(const std::string& layer, const char* tensor,
                                     const kernels::Bf16* rows, int heads, int head_dim, int first,
                                     int count, int begin, int tokens) {
  Eigen::MatrixXf out(tokens * count, head_dim);
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < count; ++h) {
      const kernels::Bf16* row =
          rows + (static_cast<int64_t>(begin + t) * heads + first + h) * head_dim;
      for (int i = 0; i < head_dim; ++i) out(t * count + h, i) = kernels::Bf16ToFloat(row[i]);
    }
  }
  if (!out.allFinite()) {
    return absl::InvalidArgumentError("layer " + layer + ": " + tensor +
                                      " holds a value that is not finite");
  }
  return out;
}

// Returns the sum of x x' over rows x.
Eigen::MatrixXd MomentOf(const Eigen::MatrixXf& rows) {
  Eigen::MatrixXf moment = Eigen::MatrixXf::Zero(rows.cols(), rows.cols());
  moment.selfadjointView<Eigen::Lower>().rankUpdate(rows.transpose());
  return Eigen::MatrixXf(moment.selfadjointView<Eigen::Lower>()).cast<double>();
}

}  // namespace

absl::StatusOr<Eigen::MatrixXf> QueryRows(const ModelShape& shape,
                                          const SequenceActivations& sequence, int kv_head,
                                          int begin, int count) {
  const int group = shape.q_heads / shape.kv_heads;
  return Rows(std::to_string(shape.LayerId(sequence.layer)), "q", sequence.q, shape.q_heads,
              shape.head_dim, kv_head * group, group, begin, count);
}

absl::StatusOr<Eigen::MatrixXf> KeyRows(const ModelShape& shape,
                                        const SequenceActivations& sequence, int kv_head, int begin,
                                        int count) {
  return Rows(std::to_string(shape.LayerId(sequence.layer)), "k", sequence.k, shape.kv_heads,
              shape.head_dim, kv_head, 1, begin, count);
}

absl::StatusOr<Eigen::MatrixXf> ValueRows(const ModelShape& shape,
                                          const SequenceActivations& sequence, int kv_head,
                                          int begin, int count) {
  return Rows(std::to_string(shape.LayerId(sequence.layer)), "v", sequence.v, shape.kv_heads,
              shape.head_dim, kv_head, 1, begin, count);
}

absl::Status ForTokenBlocks(int begin, int end,
                            const std::function<absl::Status(int begin, int count)>& body) {
  for (int at = begin; at < end; at += kBlockTokens) {
    CRUMB_RETURN_IF_ERROR(body(at, std::min(kBlockTokens, end - at)));
  }
  return absl::OkStatus();
}

HeadMoments::HeadMoments(int head_dim)
    : query_moment_(Eigen::MatrixXd::Zero(head_dim, head_dim)),
      key_moment_(query_moment_),
      value_moment_(query_moment_),
      key_sum_(Eigen::VectorXd::Zero(head_dim)),
      value_sum_(Eigen::VectorXd::Zero(head_dim)) {}

absl::Status HeadMoments::Add(const ModelShape& shape, const PositionRotations& rotations,
                              const SequenceActivations& sequence, int kv_head, int begin) {
  return ForTokenBlocks(begin, sequence.tokens, [&](int at, int count) -> absl::Status {
    CRUMB_ASSIGN_OR_RETURN(Eigen::MatrixXf q, QueryRows(shape, sequence, kv_head, at, count));
    CRUMB_ASSIGN_OR_RETURN(Eigen::MatrixXf k, KeyRows(shape, sequence, kv_head, at, count));
    CRUMB_ASSIGN_OR_RETURN(const Eigen::MatrixXf v, ValueRows(shape, sequence, kv_head, at, count));
    rotations.InverseRotate(at, shape.q_heads / shape.kv_heads, q);
    rotations.InverseRotate(at, 1, k);
    query_moment_ += MomentOf(q);
    key_moment_ += MomentOf(k);
    value_moment_ += MomentOf(v);
    key_sum_ += k.cast<double>().colwise().sum().transpose();
    value_sum_ += v.cast<double>().colwise().sum().transpose();
    queries_ += q.rows();
    tokens_ += k.rows();
    return absl::OkStatus();
  });
}

}  // namespace crumb::calibration
