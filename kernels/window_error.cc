// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/window_error.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/bf16.h"

namespace crumb::kernels {
namespace {

// Every kRowStep-th row's own error is measured: rotating a row costs as much as 2 head_dim dot
// products.
constexpr int kRowStep = 8;

// Squared norms of a difference and of the vector that it is compared with.
struct Ratio {
  double difference = 0.0;
  double whole = 0.0;

  float value() const {
    return whole > 0.0 ? static_cast<float>(std::sqrt(difference / whole)) : 0.0f;
  }
};

// Computes out = x R, or x R' if `transposed`. A null R is the identity.
void Rotate(const float* x, const float* rotation, bool transposed, int dim, float* out) {
  if (rotation == nullptr) {
    std::copy_n(x, dim, out);
    return;
  }
  if (transposed) {
    for (int i = 0; i < dim; ++i) {
      float sum = 0.0f;
      for (int c = 0; c < dim; ++c) sum += x[c] * rotation[i * dim + c];
      out[i] = sum;
    }
    return;
  }
  std::fill_n(out, dim, 0.0f);
  for (int i = 0; i < dim; ++i) {
    for (int c = 0; c < dim; ++c) out[c] += x[i] * rotation[i * dim + c];
  }
}

// Converts rows to float, [tokens, dim].
std::vector<float> Widen(const Bf16* rows, int64_t stride, int tokens, int dim) {
  std::vector<float> out(static_cast<size_t>(tokens) * dim);
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < dim; ++c) out[t * dim + c] = Bf16ToFloat(rows[t * stride + c]);
  }
  return out;
}

void AddMean(const float* mean, int dim, std::vector<float>& rows) {
  if (mean == nullptr) return;
  for (size_t i = 0; i < rows.size(); ++i) rows[i] += mean[i % dim];
}

// Attention of one query over rows [tokens, dim] of keys and values in one basis.
void AttendWindow(const float* q, const std::vector<float>& k, const std::vector<float>& v, int dim,
                  float scale, float soft_cap, float* out) {
  const int tokens = static_cast<int>(k.size()) / dim;
  std::vector<float> weight(tokens);
  for (int t = 0; t < tokens; ++t) {
    float logit = 0.0f;
    for (int c = 0; c < dim; ++c) logit += q[c] * k[t * dim + c];
    logit *= scale;
    weight[t] = soft_cap > 0.0f ? soft_cap * std::tanh(logit / soft_cap) : logit;
  }
  const float largest = *std::max_element(weight.begin(), weight.end());
  float sum = 0.0f;
  for (float& w : weight) sum += w = std::exp(w - largest);
  std::fill_n(out, dim, 0.0f);
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < dim; ++c) out[c] += weight[t] / sum * v[t * dim + c];
  }
}

// Returns the error of the tile's rows `stored` [tokens, dim], with the mean added back, against
// `exact`. An orthogonal rotation changes no norm; otherwise the dual maps the difference back.
float RowError(const std::vector<float>& exact, const std::vector<float>& stored,
               const RowTransform& transform, int dim) {
  Ratio ratio;
  std::vector<float> rotated(dim), difference(dim);
  const float* const back = transform.dual == transform.rotation ? nullptr : transform.dual;
  for (size_t row = 0; row < exact.size(); row += size_t{kRowStep} * dim) {
    Rotate(&exact[row], transform.rotation, false, dim, rotated.data());
    for (int c = 0; c < dim; ++c) rotated[c] = stored[row + c] - rotated[c];
    Rotate(rotated.data(), back, true, dim, difference.data());
    for (int c = 0; c < dim; ++c) {
      ratio.difference += double{difference[c]} * difference[c];
      ratio.whole += double{exact[row + c]} * exact[row + c];
    }
  }
  return ratio.value();
}

}  // namespace

WindowError MeasureWindow(const QuantizeParams& window, std::span<const float> queries, float scale,
                          float soft_cap) {
  const int dim = window.shape.head_dim, tokens = window.shape.tokens;
  const std::vector<float> k = Widen(window.k, window.k_stride, tokens, dim);
  const std::vector<float> v = Widen(window.v, window.v_stride, tokens, dim);
  std::vector<float> stored_k(k.size()), stored_v(v.size());
  DequantizeTile(window.shape, window.tile, stored_k.data(), stored_v.data());
  AddMean(window.k_transform.mean, dim, stored_k);
  AddMean(window.v_transform.mean, dim, stored_v);

  Ratio attention;
  std::vector<float> rotated(dim), exact(dim), basis(dim), got(dim);
  for (size_t at = 0; at + dim <= queries.size(); at += dim) {
    AttendWindow(&queries[at], k, v, dim, scale, soft_cap, exact.data());
    Rotate(&queries[at], window.k_transform.inverse(), false, dim, rotated.data());
    AttendWindow(rotated.data(), stored_k, stored_v, dim, scale, soft_cap, basis.data());
    Rotate(basis.data(), window.v_transform.inverse(), true, dim, got.data());
    for (int c = 0; c < dim; ++c) {
      attention.difference += double{got[c] - exact[c]} * (got[c] - exact[c]);
      attention.whole += double{exact[c]} * exact[c];
    }
  }
  return {.attention = attention.value(),
          .key = RowError(k, stored_k, window.k_transform, dim),
          .value = RowError(v, stored_v, window.v_transform, dim)};
}

}  // namespace crumb::kernels
