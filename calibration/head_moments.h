// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "calibration/activation_source.h"

namespace crumb::calibration {

// Returns tokens [begin, begin + count) of one KV head: keys or values as rows [count, head_dim],
// and the queries of its query heads token by token as rows [count * heads, head_dim].
// kInvalidArgument names layer and tensor: a value is not finite.
absl::StatusOr<Eigen::MatrixXf> QueryRows(const ModelShape& shape,
                                          const SequenceActivations& sequence, int kv_head,
                                          int begin, int count);
absl::StatusOr<Eigen::MatrixXf> KeyRows(const ModelShape& shape,
                                        const SequenceActivations& sequence, int kv_head, int begin,
                                        int count);
absl::StatusOr<Eigen::MatrixXf> ValueRows(const ModelShape& shape,
                                          const SequenceActivations& sequence, int kv_head,
                                          int begin, int count);

// Calls body(begin, count) for tokens [begin, end) in blocks, which bounds the size of matrices.
absl::Status ForTokenBlocks(int begin, int end,
                            const std::function<absl::Status(int begin, int count)>& body);

// Moments of the rows of one (layer, KV head); queries and keys are those before RoPE.
class HeadMoments {
 public:
  explicit HeadMoments(int head_dim);

  // Adds tokens [begin, tokens) of one sequence. `rotations` are those of all its positions.
  absl::Status Add(const ModelShape& shape, const PositionRotations& rotations,
                   const SequenceActivations& sequence, int kv_head, int begin);

  int64_t tokens() const { return tokens_; }
  Eigen::MatrixXd query_moment() const { return query_moment_ / static_cast<double>(queries_); }
  Eigen::VectorXd key_mean() const { return key_sum_ / static_cast<double>(tokens_); }
  Eigen::VectorXd value_mean() const { return value_sum_ / static_cast<double>(tokens_); }
  // Covariances about the means; that of keys is before RoPE.
  Eigen::MatrixXd key_covariance() const { return Covariance(key_moment_, key_mean()); }
  Eigen::MatrixXd value_covariance() const { return Covariance(value_moment_, value_mean()); }

 private:
  Eigen::MatrixXd Covariance(const Eigen::MatrixXd& moment, const Eigen::VectorXd& mean) const {
    return moment / static_cast<double>(tokens_) - mean * mean.transpose();
  }

  Eigen::MatrixXd query_moment_;
  Eigen::MatrixXd key_moment_;
  Eigen::MatrixXd value_moment_;
  Eigen::VectorXd key_sum_;
  Eigen::VectorXd value_sum_;
  int64_t queries_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace crumb::calibration
