// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/fp16.h"
#include "kernels/quantize.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/cpu/each_isa.h"
#include "tests/kernels/random_data.h"
#include "tests/kernels/shapes.h"

// The method `crumb` against its definition in double precision.
namespace crumb::kernels {
namespace {

// Rows that serve as K and as V.
struct Window {
  TileShape shape;
  std::vector<Bf16> rows;
  std::vector<float> rotation, mean, feedback;
  float clip = 0.92f;

  explicit Window(const TileShape& s) : shape(s) {}
  size_t elements() const { return static_cast<size_t>(shape.tokens) * shape.head_dim; }

  RowTransform Transform() const {
    const auto pointer = [](const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); };
    return {pointer(rotation), pointer(mean), clip, pointer(feedback)};
  }

  std::vector<uint8_t> Quantize(uint32_t* status, Method method = Method::kCrumb) const {
    std::vector<uint8_t> tile(shape.int2_bytes(), 0xa5);
    QuantizeParams params;
    params.shape = shape;
    params.method = method;
    params.k = params.v = rows.data();
    params.k_stride = params.v_stride = shape.head_dim;
    params.k_transform = params.v_transform = Transform();
    params.tile = tile.data();
    *status = QuantizeTile(params);
    return tile;
  }

  std::vector<uint8_t> CodesOf(const std::vector<uint8_t>& tile, int t) const {
    std::vector<uint8_t> codes;
    for (int i = 0; i < shape.head_dim; ++i) {
      codes.push_back(static_cast<uint8_t>(ReadCode(shape, tile.data(), TilePart::kKey, t, i)));
    }
    return codes;
  }
};

// A random upper triangular matrix whose entries decay like those of a damped factorization. Its
// diagonal is 0, so that the metric is the identity.
std::vector<float> RandomFeedback(int dim, RandomData* random) {
  std::vector<float> feedback(static_cast<size_t>(dim) * dim, 0.0f);
  for (int i = 0; i < dim; ++i) {
    for (int j = i + 1; j < dim; ++j) feedback[i * dim + j] = random->Normal(0.3f / (1 + j - i));
  }
  return feedback;
}

// Sets the weights of a metric, which span two orders of magnitude.
void AddMetric(int dim, RandomData* random, std::vector<float>& feedback) {
  for (int i = 0; i < dim; ++i) feedback[i * dim + i] = std::exp(random->Normal(1.0f));
}

Window RandomWindow(const TileShape& shape, RandomData* random) {
  Window window(shape);
  window.rows = random->Rows(window.elements());
  window.rotation = random->Orthogonal(shape.head_dim);
  window.mean = random->Floats(shape.head_dim, 0.5f);
  window.feedback = RandomFeedback(shape.head_dim, random);
  return window;
}

void ExpectRowMatchesReference(const Window& window, const std::vector<uint8_t>& tile, int t) {
  const TileShape& shape = window.shape;
  const std::vector<uint8_t> codes = window.CodesOf(tile, t);
  const reference::FeedbackRow row = reference::QuantizeFeedbackRow(
      shape, &window.rows[t * shape.head_dim], window.Transform(), codes.data());
  for (int i = 0; i < shape.head_dim; ++i) {
    const double steps = std::clamp(row.steps[i], 0.0, 3.0);
    ASSERT_NEAR(codes[i], steps, 0.5 + 1e-3) << "token " << t << " channel " << i;
  }
  for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
    for (int group = 0; group < shape.groups(); ++group) {
      const RowMeta meta = ReadMeta(shape, tile.data(), part, t, group);
      ASSERT_NEAR(Fp16ToFloat(meta.scale), row.scale[group], 6e-4 * row.scale[group] + 3e-8);
      ASSERT_NEAR(Fp16ToFloat(meta.minimum), row.minimum[group],
                  6e-4 * std::abs(row.minimum[group]) + 2e-6);
    }
  }
}

using FeedbackTest = EachIsa;

INSTANTIATE_TEST_SUITE_P(Isas, FeedbackTest, testing::ValuesIn(kAllIsas), IsaNameOf);

TEST_P(FeedbackTest, MatchesTheDoublePrecisionReference) {
  RandomData random;
  for (const TileShape& shape : AllShapes()) {
    for (const char* const constants : {"none", "feedback", "feedback and metric"}) {
      SCOPED_TRACE(Name(shape) + " " + constants);
      Window window = RandomWindow(shape, &random);
      if (constants == std::string("none")) window.feedback.clear();
      if (constants == std::string("feedback and metric")) {
        AddMetric(shape.head_dim, &random, window.feedback);
      }
      uint32_t status = 0;
      const std::vector<uint8_t> tile = window.Quantize(&status);
      EXPECT_EQ(status, 0u);
      for (int t = 0; t < shape.tokens; t += 7) ExpectRowMatchesReference(window, tile, t);
    }
  }
}

TEST_P(FeedbackTest, SameBytesAsPortable) {
  RandomData random;
  for (const TileShape& shape : AllShapes()) {
    SCOPED_TRACE(Name(shape));
    Window window = RandomWindow(shape, &random);
    for (int i = 0; i < 60; ++i) {
      const int at = random.Below(window.elements());
      window.rows[at] = i % 2 == 0 ? Bf16FromFloat(random.Normal(1e4f))
                                   : Bf16{static_cast<uint16_t>(random.Below(65536))};
    }
    ExpectSameBytesAsPortable(window);
    AddMetric(shape.head_dim, &random, window.feedback);
    ExpectSameBytesAsPortable(window);
  }
}

// Errors against the unclipped row and errors against the clipped row are different methods: the
// reference of the first must accept the tile, that of the second must not.
TEST_P(FeedbackTest, FeedbackSeesTheRowWithoutClip) {
  RandomData random;
  const TileShape shape{64, 128, 128};
  Window window = RandomWindow(shape, &random);
  window.clip = 0.8f;
  window.rotation.clear();
  window.mean.clear();
  uint32_t status = 0;
  const std::vector<uint8_t> tile = window.Quantize(&status);
  int contradictions = 0;
  for (int t = 0; t < shape.tokens; ++t) {
    ExpectRowMatchesReference(window, tile, t);
    const std::vector<uint8_t> codes = window.CodesOf(tile, t);
    std::vector<Bf16> clipped(&window.rows[t * 128], &window.rows[(t + 1) * 128]);
    std::vector<float> magnitudes;
    for (const Bf16 x : clipped) magnitudes.push_back(std::abs(Bf16ToFloat(x)));
    std::sort(magnitudes.begin(), magnitudes.end());
    const float threshold = magnitudes[static_cast<int>(0.8f * 128)];
    for (Bf16& x : clipped) {
      x = Bf16FromFloat(std::clamp(Bf16ToFloat(x), -threshold, threshold));
    }
    const reference::FeedbackRow other =
        reference::QuantizeFeedbackRow(shape, clipped.data(), window.Transform(), codes.data());
    for (int i = 0; i < 128; ++i) {
      contradictions += std::abs(codes[i] - std::clamp(other.steps[i], 0.0, 3.0)) > 0.5 + 1e-3;
    }
  }
  EXPECT_GT(contradictions, 64 * 4);
}

// The purpose of the method is a smaller error in the norm of H = (I + U) D (I + U)'.
TEST_P(FeedbackTest, LowersTheWeightedError) {
  RandomData random;
  const TileShape shape{64, 128, 128};
  Window window = RandomWindow(shape, &random);
  window.clip = 0.0f;
  window.mean.clear();
  window.rotation.clear();
  for (float& weight : window.feedback) weight *= 3.0f;
  const auto weighted_error = [&](Method method) {
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status, method);
    double sum = 0.0;
    for (int t = 0; t < shape.tokens; ++t) {
      std::vector<double> error(128);
      for (int i = 0; i < 128; ++i) {
        error[i] = Bf16ToFloat(window.rows[t * 128 + i]) -
                   reference::Dequantize(shape, tile.data(), TilePart::kKey, t, i);
      }
      for (int j = 0; j < 128; ++j) {
        double weighted = error[j];
        for (int i = 0; i < j; ++i) weighted += error[i] * window.feedback[i * 128 + j];
        sum += weighted * weighted;
      }
    }
    return sum;
  };
  EXPECT_LT(weighted_error(Method::kCrumb), 0.9 * weighted_error(Method::kOscar));
}

TEST_P(FeedbackTest, KeepsTheInnerProductOfARowWithItself) {
  RandomData random;
  const TileShape shape{64, 128, 64};
  Window window = RandomWindow(shape, &random);
  window.rotation.clear();
  window.mean.clear();
  uint32_t status = 0;
  const std::vector<uint8_t> tile = window.Quantize(&status);
  for (int t = 0; t < shape.tokens; ++t) {
    double own = 0.0, product = 0.0;
    for (int i = 0; i < 128; ++i) {
      const double y = Bf16ToFloat(window.rows[t * 128 + i]);
      own += y * y;
      product += y * reference::Dequantize(shape, tile.data(), TilePart::kKey, t, i);
    }
    EXPECT_NEAR(product / own, 1.0, 2e-3);
  }
}

// In a metric H the product y H z' is y H y', and the plain inner product is then another one.
TEST_P(FeedbackTest, KeepsTheInnerProductInTheMetric) {
  RandomData random;
  const TileShape shape{64, 128, 64};
  Window window = RandomWindow(shape, &random);
  AddMetric(128, &random, window.feedback);
  window.rotation.clear();
  window.mean.clear();
  uint32_t status = 0;
  const std::vector<uint8_t> tile = window.Quantize(&status);
  int plain_differs = 0;
  for (int t = 0; t < shape.tokens; ++t) {
    std::vector<double> y(128), z(128);
    for (int i = 0; i < 128; ++i) {
      y[i] = Bf16ToFloat(window.rows[t * 128 + i]);
      z[i] = reference::Dequantize(shape, tile.data(), TilePart::kKey, t, i);
    }
    double own = 0.0, product = 0.0, plain_own = 0.0, plain = 0.0;
    for (int j = 0; j < 128; ++j) {
      double from = y[j], to = z[j];
      for (int i = 0; i < j; ++i) {
        from += y[i] * window.feedback[i * 128 + j];
        to += z[i] * window.feedback[i * 128 + j];
      }
      own += window.feedback[j * 128 + j] * from * from;
      product += window.feedback[j * 128 + j] * from * to;
      plain_own += y[j] * y[j];
      plain += y[j] * z[j];
    }
    EXPECT_NEAR(product / own, 1.0, 2e-3);
    plain_differs += std::abs(plain / plain_own - 1.0) > 5e-3;
  }
  EXPECT_GT(plain_differs, shape.tokens / 2);
}

TEST_P(FeedbackTest, ConstantRowsAreExactToFp16) {
  RandomData random;
  for (const float value : {0.0f, 1.0f, -3.140625f, 1024.0f, 0x1p-24f, -65280.0f}) {
    for (const TileShape& shape : AllShapes()) {
      Window window(shape);
      window.rows.assign(window.elements(), Bf16FromFloat(value));
      window.feedback = RandomFeedback(shape.head_dim, &random);
      AddMetric(shape.head_dim, &random, window.feedback);
      uint32_t status = 0;
      const std::vector<uint8_t> tile = window.Quantize(&status);
      EXPECT_EQ(status, 0u) << value;
      std::vector<float> k(window.elements());
      DequantizeTile(shape, tile.data(), k.data(), nullptr);
      for (const float x : k) ASSERT_EQ(x, value);
    }
  }
}

// With one huge channel under a clip the codes reach the threshold only, and the ratio its limit.
TEST_P(FeedbackTest, LeavesTheClipOutWhenTheRatioReachesItsLimit) {
  RandomData random;
  const TileShape shape{64, 128, 128};
  Window window(shape);
  window.rows = random.Rows(window.elements());
  for (int t = 0; t < 64; t += 3) window.rows[t * 128 + 5] = Bf16FromFloat(500.0f);
  uint32_t status = 0;
  const std::vector<uint8_t> tile = window.Quantize(&status);
  for (int t = 0; t < 64; ++t) {
    const reference::FeedbackRow row = reference::QuantizeFeedbackRow(
        shape, &window.rows[t * 128], window.Transform(), window.CodesOf(tile, t).data());
    EXPECT_EQ(row.clipped, t % 3 != 0);
    ExpectRowMatchesReference(window, tile, t);
    if (t % 3 == 0) {
      EXPECT_NEAR(reference::Dequantize(shape, tile.data(), TilePart::kKey, t, 5), 500.0, 5.0);
    }
  }
}

TEST_P(FeedbackTest, RowsThatAreNotFiniteBecomeZeroAndDoNotSpread) {
  RandomData random;
  const TileShape shape{64, 128, 32};
  const Window clean = RandomWindow(shape, &random);
  uint32_t status = 0;
  const std::vector<uint8_t> expected = clean.Quantize(&status);
  for (const uint16_t bits : {0x7f80, 0xff80, 0x7fc0, 0xffff}) {
    Window window = clean;
    const int row = random.Below(64);
    window.rows[row * 128 + random.Below(128)].bits = bits;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    EXPECT_EQ(status, kStatusNonFinite);
    for (int t = 0; t < 64; ++t) {
      for (int i = 0; i < 128; ++i) {
        const double was = reference::Dequantize(shape, expected.data(), TilePart::kKey, t, i);
        const double now = reference::Dequantize(shape, tile.data(), TilePart::kKey, t, i);
        ASSERT_EQ(now, t == row ? 0.0 : was);
      }
    }
  }
}

TEST_P(FeedbackTest, ExtremeRowsStayFiniteAndAreReported) {
  RandomData random;
  const TileShape shape{64, 128, 64};
  for (const float extreme : {1e6f, 1e20f, 3e38f}) {
    Window window = RandomWindow(shape, &random);
    if (extreme != 1e6f) AddMetric(128, &random, window.feedback);
    window.rotation.clear();
    for (int i = 0; i < 128; ++i) {
      window.rows[9 * 128 + i] = Bf16FromFloat(i % 2 == 0 ? extreme : -extreme);
    }
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    EXPECT_EQ(status, kStatusSaturated) << extreme;
    std::vector<float> k(window.elements()), v(window.elements());
    DequantizeTile(shape, tile.data(), k.data(), v.data());
    for (const float x : k) ASSERT_TRUE(std::isfinite(x));
    for (const float x : v) ASSERT_TRUE(std::isfinite(x));
  }
}

TEST_P(FeedbackTest, RandomBitsGiveFiniteTiles) {
  RandomData random;
  for (const TileShape& shape : AllShapes()) {
    Window window = RandomWindow(shape, &random);
    for (Bf16& x : window.rows) x.bits = static_cast<uint16_t>(random.Below(65536));
    AddMetric(shape.head_dim, &random, window.feedback);
    for (float& x : window.feedback) x *= 1e6f;
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    std::vector<float> k(window.elements());
    DequantizeTile(shape, tile.data(), k.data(), nullptr);
    for (const float x : k) ASSERT_TRUE(std::isfinite(x));
  }
}

// Method names are stored in files and keyspaces.
TEST(MethodTest, NamesGoBothWays) {
  for (const Method method : {Method::kOscar, Method::kCrumb, Method::kHadamard, Method::kNaive}) {
    EXPECT_EQ(MethodNamed(MethodName(method)), method);
  }
  EXPECT_EQ(MethodNamed("Oscar"), std::nullopt);
}

// The methods naive and hadamard differ from oscar only by their transform.
TEST(MethodTest, NaiveAndHadamardRoundLikeOscar) {
  RandomData random;
  const Window window = RandomWindow({64, 128, 64}, &random);
  uint32_t status = 0;
  const std::vector<uint8_t> oscar = window.Quantize(&status, Method::kOscar);
  EXPECT_TRUE(window.Quantize(&status, Method::kNaive) == oscar);
  EXPECT_TRUE(window.Quantize(&status, Method::kHadamard) == oscar);
  EXPECT_FALSE(window.Quantize(&status, Method::kCrumb) == oscar);
}

}  // namespace
}  // namespace crumb::kernels
