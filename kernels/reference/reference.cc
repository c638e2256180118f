// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/bf16.h"
#include "kernels/fp16.h"

namespace crumb::kernels::reference {
namespace {

// One attended position: its logit, and its value in the model's basis or in R_V's.
struct Attended {
  double logit = 0.0;
  bool rotated = false;
  std::vector<double> value;
};

class RowReader {
 public:
  RowReader(const AttentionParams& params, int q_token, int q_head)
      : p_(params), token_(q_token), head_(q_head), dim_(params.shape.head_dim) {
    kv_head_ = q_head / (p_.q_heads / p_.kv_heads);
    scale_ = p_.scale != 0.0f ? static_cast<double>(p_.scale) : 1.0 / std::sqrt(dim_);
    const Bf16* q = p_.q + (static_cast<int64_t>(q_token) * p_.q_heads + q_head) * dim_;
    for (int i = 0; i < dim_; ++i) q_.push_back(Bf16ToFloat(q[i]));
    rotated_q_.assign(dim_, 0.0);
    for (int j = 0; j < dim_; ++j) {
      for (int i = 0; i < dim_; ++i) rotated_q_[j] += q_[i] * Rotation(p_.rotation_k, i, j);
    }
  }

  Attended At(int64_t position) const {
    const int64_t history = static_cast<int64_t>(p_.pages) * p_.shape.tokens;
    if (position < p_.sink_tokens) {
      const int64_t at = kv_head_ * p_.sink_head_stride + position * p_.sink_token_stride;
      return FromBf16(p_.sink_k + at, p_.sink_v + at);
    }
    position -= p_.sink_tokens;
    if (position < history) return FromPage(position / p_.shape.tokens, position % p_.shape.tokens);
    const int64_t slot = (p_.recent_begin + position - history) % p_.recent_capacity;
    const int64_t at = kv_head_ * p_.recent_head_stride + slot * p_.recent_token_stride;
    return FromBf16(p_.recent_k + at, p_.recent_v + at);
  }

  // Returns z R_V'.
  std::vector<double> InverseRotate(const std::vector<double>& z) const {
    std::vector<double> x(dim_, 0.0);
    for (int i = 0; i < dim_; ++i) {
      for (int j = 0; j < dim_; ++j) x[i] += z[j] * Rotation(p_.rotation_v, i, j);
    }
    return x;
  }

 private:
  double Rotation(const float* matrices, int i, int j) const {
    if (matrices == nullptr) return i == j ? 1.0 : 0.0;
    return matrices[(static_cast<int64_t>(kv_head_) * dim_ + i) * dim_ + j];
  }

  double Cap(double logit) const {
    return p_.soft_cap > 0.0f ? p_.soft_cap * std::tanh(logit / p_.soft_cap) : logit;
  }

  Attended FromBf16(const Bf16* k, const Bf16* v) const {
    Attended result;
    double dot = 0.0;
    for (int i = 0; i < dim_; ++i) {
      dot += q_[i] * Bf16ToFloat(k[i]);
      result.value.push_back(Bf16ToFloat(v[i]));
    }
    result.logit = Cap(dot * scale_);
    return result;
  }

  Attended FromPage(int64_t page, int64_t t) const {
    const auto* tile =
        reinterpret_cast<const uint8_t*>(p_.page_address[page]) + kv_head_ * p_.page_head_stride;
    if (p_.history_format == PageFormat::kBf16) {
      const Bf16* k = reinterpret_cast<const Bf16*>(tile) + t * dim_;
      return FromBf16(k, k + static_cast<int64_t>(p_.shape.tokens) * dim_);
    }
    double dot = 0.0;
    std::vector<double> z(dim_);
    for (int j = 0; j < dim_; ++j) {
      const int token = static_cast<int>(t);
      dot += rotated_q_[j] * Dequantize(p_.shape, tile, TilePart::kKey, token, j);
      z[j] = Dequantize(p_.shape, tile, TilePart::kValue, token, j);
      if (p_.mean_v != nullptr) z[j] += p_.mean_v[kv_head_ * dim_ + j];
    }
    if (p_.offset != nullptr) {
      const int64_t block =
          std::min<int64_t>(page / p_.pages_per_position_block, p_.position_blocks - 1);
      const int64_t row = static_cast<int64_t>(token_) * p_.q_heads + head_;
      dot += p_.offset[row * p_.position_blocks + block];
    }
    Attended result;
    result.logit = Cap(dot * scale_) - (p_.shift != nullptr ? p_.shift[head_] : 0.0f);
    result.rotated = true;
    result.value = z;
    return result;
  }

  const AttentionParams& p_;
  const int token_;
  const int head_;
  const int dim_;
  int64_t kv_head_ = 0;
  double scale_ = 0.0;
  std::vector<double> q_;
  std::vector<double> rotated_q_;
};

}  // namespace

double Dequantize(const TileShape& shape, const uint8_t* tile, TilePart part, int token,
                  int channel) {
  const RowMeta meta = ReadMeta(shape, tile, part, token, channel / shape.group_size);
  const double scale = Fp16ToFloat(meta.scale), minimum = Fp16ToFloat(meta.minimum);
  return minimum + scale * ReadCode(shape, tile, part, token, channel);
}

namespace {

// Returns x R - mean.
std::vector<double> TransformRow(int d, const Bf16* x, const RowTransform& transform) {
  std::vector<double> y(d, 0.0);
  for (int j = 0; j < d; ++j) {
    for (int i = 0; i < d; ++i) {
      const double r =
          transform.rotation == nullptr ? (i == j ? 1.0 : 0.0) : transform.rotation[i * d + j];
      if (r != 0.0) y[j] += Bf16ToFloat(x[i]) * r;
    }
    if (transform.mean != nullptr) y[j] -= transform.mean[j];
  }
  return y;
}

// Returns the value at index min(floor(clip d), d - 1) of ascending |y|, or no limit without clip.
double ClipThreshold(const std::vector<double>& y, float clip) {
  if (clip <= 0.0f) return std::numeric_limits<double>::max();
  std::vector<double> magnitudes;
  for (const double value : y) magnitudes.push_back(std::abs(value));
  std::sort(magnitudes.begin(), magnitudes.end());
  const int d = static_cast<int>(y.size());
  return magnitudes[std::min(static_cast<int>(clip * static_cast<float>(d)), d - 1)];
}

// Adds minimum and scale of the group that begins at channel `first`, from y clamped to
// +-threshold.
void AddRange(const TileShape& shape, const std::vector<double>& y, int first, double threshold,
              std::vector<double>& minimum, std::vector<double>& scale) {
  double least = std::numeric_limits<double>::max(), most = -least;
  for (int i = first; i < first + shape.group_size; ++i) {
    const double clamped = std::clamp(y[i], -threshold, threshold);
    least = std::min(least, clamped);
    most = std::max(most, clamped);
  }
  minimum.push_back(least);
  scale.push_back(std::max(most - least, 1e-8) / 3.0);
}

// Returns x H y', where H is the metric (I + U) D (I + U)' of the transform, or the identity.
double MetricProduct(const RowTransform& transform, const std::vector<double>& x,
                     const std::vector<double>& y) {
  const size_t d = x.size();
  double sum = 0.0;
  for (size_t j = 0; j < d; ++j) {
    double from = x[j], to = y[j];
    for (size_t i = 0; i < j && transform.has_metric(); ++i) {
      from += x[i] * transform.feedback[i * d + j];
      to += y[i] * transform.feedback[i * d + j];
    }
    sum += from * to * (transform.has_metric() ? transform.feedback[j * d + j] : 1.0);
  }
  return sum;
}

FeedbackRow RoundWithFeedback(const TileShape& shape, const std::vector<double>& y,
                              const RowTransform& transform, double threshold,
                              const uint8_t* codes) {
  const int d = shape.head_dim;
  const float* const feedback = transform.feedback;
  FeedbackRow row;
  for (int first = 0; first < d; first += shape.group_size) {
    AddRange(shape, y, first, threshold, row.minimum, row.scale);
  }
  std::vector<double> error(d), z(d);
  for (int j = 0; j < d; ++j) {
    const int group = j / shape.group_size;
    double target = y[j];
    if (feedback != nullptr) {
      for (int i = 0; i < j; ++i) target += error[i] * feedback[i * d + j];
    }
    row.steps.push_back((target - row.minimum[group]) / row.scale[group]);
    const double code =
        codes != nullptr ? codes[j] : std::clamp(std::floor(row.steps[j] + 0.5), 0.0, 3.0);
    z[j] = row.minimum[group] + row.scale[group] * code;
    error[j] = y[j] - z[j];
  }
  const double own = MetricProduct(transform, y, y), product = MetricProduct(transform, y, z);
  if (product > 0.0) row.ratio = std::clamp(own / product, 0.5, 2.0);
  for (double& value : row.minimum) value *= row.ratio;
  for (double& value : row.scale) value *= row.ratio;
  return row;
}

}  // namespace

Row QuantizeRow(const TileShape& shape, const Bf16* x, const RowTransform& transform) {
  Row row;
  row.y = TransformRow(shape.head_dim, x, transform);
  row.finite = std::all_of(row.y.begin(), row.y.end(), [](double y) { return std::isfinite(y); });
  if (!row.finite) return row;
  const double threshold = ClipThreshold(row.y, transform.clip);
  for (int first = 0; first < shape.head_dim; first += shape.group_size) {
    AddRange(shape, row.y, first, threshold, row.minimum, row.scale);
    for (int i = first; i < first + shape.group_size; ++i) {
      const double clamped = std::clamp(row.y[i], -threshold, threshold);
      row.steps.push_back((clamped - row.minimum.back()) / row.scale.back());
    }
  }
  return row;
}

FeedbackRow QuantizeFeedbackRow(const TileShape& shape, const Bf16* x,
                                const RowTransform& transform, const uint8_t* codes) {
  const std::vector<double> y = TransformRow(shape.head_dim, x, transform);
  FeedbackRow row;
  row.finite = std::all_of(y.begin(), y.end(), [](double value) { return std::isfinite(value); });
  if (!row.finite) return row;
  const double threshold = ClipThreshold(y, transform.clip);
  const bool clip_left_out =
      RoundWithFeedback(shape, y, transform, threshold, nullptr).ratio >= 2.0;
  row = RoundWithFeedback(shape, y, transform,
                          clip_left_out ? std::numeric_limits<double>::max() : threshold, codes);
  row.clipped = !clip_left_out;
  return row;
}

AttentionRow Attend(const AttentionParams& params, int q_token, int q_head) {
  const int64_t total = params.sink_tokens +
                        static_cast<int64_t>(params.pages) * params.shape.tokens +
                        params.recent_tokens;
  const int64_t last = total - params.q_tokens + q_token;
  const int64_t first = params.window > 0 ? std::max<int64_t>(0, last - params.window + 1) : 0;
  const RowReader reader(params, q_token, q_head);
  std::vector<Attended> attended;
  for (int64_t position = first; position <= last; ++position) {
    attended.push_back(reader.At(position));
  }
  double maximum = -std::numeric_limits<double>::infinity();
  if (params.sink_logit != nullptr) maximum = params.sink_logit[q_head];
  for (const Attended& a : attended) maximum = std::max(maximum, a.logit);
  double sum = params.sink_logit != nullptr ? std::exp(params.sink_logit[q_head] - maximum) : 0.0;
  AttentionRow row;
  row.out.assign(params.shape.head_dim, 0.0);
  std::vector<double> rotated(params.shape.head_dim, 0.0);
  for (const Attended& a : attended) {
    const double p = std::exp(a.logit - maximum);
    sum += p;
    std::vector<double>& into = a.rotated ? rotated : row.out;
    for (size_t i = 0; i < into.size(); ++i) into[i] += p * a.value[i];
  }
  const std::vector<double> unrotated = reader.InverseRotate(rotated);
  for (size_t i = 0; i < row.out.size(); ++i) {
    row.out[i] = sum > 0.0 ? (row.out[i] + unrotated[i]) / sum : 0.0;
  }
  row.lse = maximum + std::log(sum);
  return row;
}

}  // namespace crumb::kernels::reference
