// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/common/host_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/tile_codec.h"

namespace crumb::kernels::cuda {
namespace {

// The running softmax of one row: sums over positions relative to the largest logit so far.
class RowSums {
 public:
  explicit RowSums(int dim) : bf16_(dim, 0.0), rotated_(dim, 0.0) {}

  // Returns the weight of a position with this logit, by which the caller multiplies the position's
  // value.
  double Weigh(double logit) {
    if (logit > maximum_) {
      const double factor = std::exp(maximum_ - logit);
      sum_ *= factor;
      history_mass_ *= factor;
      for (double& x : bf16_) x *= factor;
      for (double& x : rotated_) x *= factor;
      maximum_ = logit;
    }
    const double p = std::exp(logit - maximum_);
    sum_ += p;
    return p;
  }

  double maximum_ = -std::numeric_limits<double>::infinity();
  double sum_ = 0.0;
  double history_mass_ = 0.0;
  std::vector<double> bf16_;     // sum over BF16 values, in the model's basis
  std::vector<double> rotated_;  // sum over INT2 values, in the rotated basis
};

class Row {
 public:
  Row(const AttentionParams& params, int q_token, int q_head)
      : p_(params), token_(q_token), head_(q_head), dim_(params.shape.head_dim), sums_(dim_) {
    kv_head_ = q_head / (p_.q_heads / p_.kv_heads);
    scale_ = p_.scale != 0.0f ? p_.scale : 1.0 / std::sqrt(dim_);
    const int64_t total = Total();
    last_ = total - p_.q_tokens + q_token;
    first_ = p_.window > 0 ? std::max<int64_t>(0, last_ - p_.window + 1) : 0;
    const Bf16* q = p_.q + (static_cast<int64_t>(q_token) * p_.q_heads + q_head) * dim_;
    for (int i = 0; i < dim_; ++i) q_.push_back(Bf16ToFloat(q[i]));
    rotated_q_ = q_;
    if (p_.rotation_k != nullptr) {
      rotated_q_.assign(dim_, 0.0);
      for (int i = 0; i < dim_; ++i) {
        for (int j = 0; j < dim_; ++j) rotated_q_[j] += q_[i] * At(p_.rotation_k, i, j);
      }
    }
  }

  OracleRow Attend() {
    if (p_.sink_logit != nullptr) sums_.Weigh(p_.sink_logit[head_]);
    for (int64_t t = 0; t < p_.sink_tokens; ++t) {
      const int64_t at = kv_head_ * p_.sink_head_stride + t * p_.sink_token_stride;
      AddBf16(t, p_.sink_k + at, p_.sink_v + at);
    }
    for (int page = 0; page < p_.pages; ++page) AddPage(page);
    const int64_t before = p_.sink_tokens + static_cast<int64_t>(p_.pages) * p_.shape.tokens;
    for (int64_t t = 0; t < p_.recent_tokens; ++t) {
      const int64_t slot = (p_.recent_begin + t) % p_.recent_capacity;
      const int64_t at = kv_head_ * p_.recent_head_stride + slot * p_.recent_token_stride;
      AddBf16(before + t, p_.recent_k + at, p_.recent_v + at);
    }
    return Result();
  }

 private:
  int64_t Total() const {
    return p_.sink_tokens + static_cast<int64_t>(p_.pages) * p_.shape.tokens + p_.recent_tokens;
  }
  double At(const float* matrices, int i, int j) const {
    return matrices[(static_cast<int64_t>(kv_head_) * dim_ + i) * dim_ + j];
  }
  double Cap(double logit) const {
    return p_.soft_cap > 0.0f ? p_.soft_cap * std::tanh(logit / p_.soft_cap) : logit;
  }

  void AddBf16(int64_t position, const Bf16* k, const Bf16* v) {
    if (position < first_ || position > last_) return;
    double dot = 0.0;
    for (int i = 0; i < dim_; ++i) dot += q_[i] * Bf16ToFloat(k[i]);
    const double p = sums_.Weigh(Cap(dot * scale_));
    for (int i = 0; i < dim_; ++i) sums_.bf16_[i] += p * Bf16ToFloat(v[i]);
  }

  void AddPage(int page) {
    const auto* tile =
        reinterpret_cast<const uint8_t*>(p_.page_address[page]) + kv_head_ * p_.page_head_stride;
    double offset = 0.0;
    if (p_.offset != nullptr) {
      const int block = std::min(page / p_.pages_per_position_block, p_.position_blocks - 1);
      offset = p_.offset[(static_cast<int64_t>(token_) * p_.q_heads + head_) * p_.position_blocks +
                         block];
    }
    std::vector<double> z(dim_);
    for (int t = 0; t < p_.shape.tokens; ++t) {
      const int64_t position = p_.sink_tokens + static_cast<int64_t>(page) * p_.shape.tokens + t;
      if (position < first_ || position > last_) continue;
      Dequantize(tile, TilePart::kKey, t, &z);
      double dot = offset;
      for (int j = 0; j < dim_; ++j) dot += rotated_q_[j] * z[j];
      const double shift = p_.shift != nullptr ? p_.shift[head_] : 0.0;
      const double p = sums_.Weigh(Cap(dot * scale_) - shift);
      sums_.history_mass_ += p;
      Dequantize(tile, TilePart::kValue, t, &z);
      for (int j = 0; j < dim_; ++j) sums_.rotated_[j] += p * z[j];
    }
  }

  void Dequantize(const uint8_t* tile, TilePart part, int token, std::vector<double>* z) const {
    for (int y = 0; y < p_.shape.groups(); ++y) {
      const RowMeta meta = ReadMeta(p_.shape, tile, part, token, y);
      const double scale = Fp16ToFloat(meta.scale), minimum = Fp16ToFloat(meta.minimum);
      for (int j = y * p_.shape.group_size; j < (y + 1) * p_.shape.group_size; ++j) {
        (*z)[j] = minimum + scale * ReadCode(p_.shape, tile, part, token, j);
      }
    }
  }

  OracleRow Result() {
    std::vector<double> history = sums_.rotated_;
    if (p_.mean_v != nullptr) {
      for (int j = 0; j < dim_; ++j) {
        history[j] += sums_.history_mass_ * p_.mean_v[kv_head_ * dim_ + j];
      }
    }
    OracleRow row;
    row.out = sums_.bf16_;
    for (int i = 0; i < dim_; ++i) {
      if (p_.rotation_v == nullptr) {
        row.out[i] += history[i];
      } else {
        for (int j = 0; j < dim_; ++j) row.out[i] += history[j] * At(p_.rotation_v, i, j);
      }
    }
    for (double& x : row.out) x = sums_.sum_ > 0.0 ? x / sums_.sum_ : 0.0;
    row.lse = sums_.maximum_ + std::log(sums_.sum_);
    return row;
  }

  const AttentionParams& p_;
  const int token_;
  const int head_;
  const int dim_;
  int kv_head_ = 0;
  double scale_ = 0.0;
  int64_t first_ = 0;
  int64_t last_ = 0;
  std::vector<double> q_;
  std::vector<double> rotated_q_;
  RowSums sums_;
};

}  // namespace

OracleRow OracleAttend(const AttentionParams& params, int q_token, int q_head) {
  return Row(params, q_token, q_head).Attend();
}

}  // namespace crumb::kernels::cuda
