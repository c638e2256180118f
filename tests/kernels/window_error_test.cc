// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/window_error.h"

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/bf16.h"

namespace crumb::kernels {
namespace {

constexpr int kDim = 64, kTokens = 64;

class WindowErrorTest : public testing::Test {
 protected:
  WindowErrorTest() {
    params_.shape = {.tokens = kTokens, .head_dim = kDim, .group_size = 64};
    for (unsigned i = 0; i < kDim * kDim; ++i) {
      const bool odd = std::popcount(i / kDim & i % kDim) % 2 == 1;
      hadamard_.push_back((odd ? -1.0f : 1.0f) / std::sqrt(float{kDim}));
    }
    for (std::vector<Bf16>* rows : {&k_, &v_}) {
      for (int i = 0; i < kTokens * kDim; ++i) {
        rows->push_back(Bf16FromFloat(normal_(random_)));
      }
    }
    for (int i = 0; i < 6 * kDim; ++i) queries_.push_back(normal_(random_));
    for (int c = 0; c < kDim; ++c) {
      mean_k_.push_back(0.1f * normal_(random_));
      mean_v_.push_back(0.1f * normal_(random_));
    }
    tile_.resize(params_.shape.int2_bytes() + 128);
    params_.k = k_.data();
    params_.v = v_.data();
    params_.k_stride = params_.v_stride = kDim;
    params_.k_transform = {hadamard_.data(), mean_k_.data(), 0.96f, nullptr};
    params_.v_transform = {hadamard_.data(), mean_v_.data(), 0.92f, nullptr};
    params_.tile = tile_.data() + (128 - reinterpret_cast<uintptr_t>(tile_.data()) % 128) % 128;
  }

  // Returns the attention of one query in double precision, with rows in the model's basis.
  std::vector<double> Attend(const float* q, const std::vector<double>& k,
                             const std::vector<double>& v, double scale, double cap) const {
    std::vector<double> out(kDim, 0.0), weight;
    double sum = 0.0;
    for (int t = 0; t < kTokens; ++t) {
      double dot = 0.0;
      for (int c = 0; c < kDim; ++c) dot += q[c] * k[t * kDim + c];
      dot *= scale;
      weight.push_back(std::exp(cap > 0.0 ? cap * std::tanh(dot / cap) : dot));
      sum += weight.back();
    }
    for (int t = 0; t < kTokens; ++t) {
      for (int c = 0; c < kDim; ++c) out[c] += weight[t] / sum * v[t * kDim + c];
    }
    return out;
  }

  double ExpectedAttentionError(double scale, double cap) const {
    std::vector<float> k(kTokens * kDim), v(kTokens * kDim);
    DequantizeTileToModel(params_.shape, params_.tile, params_.k_transform, params_.v_transform,
                          k.data(), v.data());
    std::vector<double> exact_k, exact_v;
    for (const Bf16 x : k_) exact_k.push_back(Bf16ToFloat(x));
    for (const Bf16 x : v_) exact_v.push_back(Bf16ToFloat(x));
    double difference = 0.0, whole = 0.0;
    for (size_t at = 0; at < queries_.size(); at += kDim) {
      const auto exact = Attend(&queries_[at], exact_k, exact_v, scale, cap);
      const auto got =
          Attend(&queries_[at], {k.begin(), k.end()}, {v.begin(), v.end()}, scale, cap);
      for (int c = 0; c < kDim; ++c) {
        difference += (got[c] - exact[c]) * (got[c] - exact[c]);
        whole += exact[c] * exact[c];
      }
    }
    return std::sqrt(difference / whole);
  }

  // Returns ||x' - x|| / ||x|| over every eighth row: a rotation changes no norm.
  double ExpectedRowError(const std::vector<Bf16>& rows, bool keys) const {
    std::vector<float> k(kTokens * kDim), v(kTokens * kDim);
    DequantizeTileToModel(params_.shape, params_.tile, params_.k_transform, params_.v_transform,
                          k.data(), v.data());
    double difference = 0.0, whole = 0.0;
    for (int i = 0; i < kTokens * kDim; ++i) {
      if (i / kDim % 8 != 0) continue;
      const double exact = Bf16ToFloat(rows[i]);
      difference += std::pow((keys ? k : v)[i] - exact, 2);
      whole += exact * exact;
    }
    return std::sqrt(difference / whole);
  }

  std::mt19937 random_{5};
  std::normal_distribution<float> normal_;
  std::vector<float> hadamard_;
  std::vector<Bf16> k_, v_;
  std::vector<float> queries_, mean_k_, mean_v_;
  std::vector<uint8_t> tile_;
  QuantizeParams params_;
};

TEST_F(WindowErrorTest, AgreesWithDoublePrecision) {
  ASSERT_EQ(QuantizeTile(params_), 0u);
  for (const float cap : {0.0f, 2.0f}) {
    const WindowError sample = MeasureWindow(params_, queries_, 0.125f, cap);
    const double expected = ExpectedAttentionError(0.125, cap);
    EXPECT_GT(expected, 0.1);  // 2 bits leave an error to measure
    EXPECT_NEAR(sample.attention, expected, 1e-4 * expected);
    EXPECT_NEAR(sample.key, ExpectedRowError(k_, true), 1e-4);
    EXPECT_NEAR(sample.value, ExpectedRowError(v_, false), 1e-4);
  }
}

// Columns of R stretched by s and those of its dual by 1 / s: queries, outputs and row errors need
// the dual.
TEST_F(WindowErrorTest, ABasisThatIsNotOrthogonalIsReadThroughItsDual) {
  std::vector<float> stretched = hadamard_, dual = hadamard_;
  for (int i = 0; i < kDim * kDim; ++i) {
    const float stretch = i % kDim < 40 ? 0.4f : 1.5f;
    stretched[i] *= stretch;
    dual[i] /= stretch;
  }
  for (RowTransform* transform : {&params_.k_transform, &params_.v_transform}) {
    transform->rotation = stretched.data();
    transform->dual = dual.data();
  }
  ASSERT_EQ(QuantizeTile(params_), 0u);
  const WindowError sample = MeasureWindow(params_, queries_, 0.125f, 0.0f);
  const double expected = ExpectedAttentionError(0.125, 0.0);
  EXPECT_NEAR(sample.attention, expected, 1e-4 * expected);
  EXPECT_NEAR(sample.key, ExpectedRowError(k_, true), 1e-4);
  EXPECT_NEAR(sample.value, ExpectedRowError(v_, false), 1e-4);
}

TEST_F(WindowErrorTest, RowsThatTheTileHoldsExactlyHaveNoError) {
  params_.k_transform = params_.v_transform = {};
  for (int i = 0; i < kTokens * kDim; ++i) {
    k_[i] = Bf16FromFloat(0.5f * static_cast<float>((i * 7 + i / kDim) % 4));
    v_[i] = Bf16FromFloat(0.25f * static_cast<float>((i * 5 + i / kDim) % 4));
  }
  ASSERT_EQ(QuantizeTile(params_), 0u);
  const WindowError sample = MeasureWindow(params_, queries_, 0.125f, 0.0f);
  EXPECT_LT(sample.attention, 1e-5);
  EXPECT_LT(sample.key, 1e-5);
  EXPECT_LT(sample.value, 1e-5);
}

TEST_F(WindowErrorTest, ADamagedTileShows) {
  ASSERT_EQ(QuantizeTile(params_), 0u);
  const WindowError before = MeasureWindow(params_, queries_, 0.125f, 0.0f);
  for (size_t i = 0; i < params_.shape.int2_bytes() / 2; ++i) params_.tile[i] ^= 0xff;
  const WindowError after = MeasureWindow(params_, queries_, 0.125f, 0.0f);
  EXPECT_GT(after.attention, 1.5f * before.attention);
  EXPECT_GT(after.key, 1.5f * before.key);
}

TEST_F(WindowErrorTest, NoQueriesMeasureRowsOnly) {
  ASSERT_EQ(QuantizeTile(params_), 0u);
  const WindowError sample = MeasureWindow(params_, {}, 0.125f, 0.0f);
  EXPECT_EQ(sample.attention, 0.0f);
  EXPECT_GT(sample.key, 0.0f);
}

}  // namespace
}  // namespace crumb::kernels
