// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/fp16.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/cpu/each_isa.h"
#include "tests/kernels/random_data.h"
#include "tests/kernels/shapes.h"

namespace crumb::kernels {
namespace {

// A window of K and V rows, each with transforms of its own.
struct Window {
  TileShape shape;
  std::vector<Bf16> k, v;
  std::vector<float> rotation_k, rotation_v, mean_k, mean_v;
  std::vector<float> dual_k;  // empty: rotation_k is orthogonal
  float clip_k = 0.96f, clip_v = 0.92f;

  explicit Window(const TileShape& s) : shape(s) {}
  size_t elements() const { return static_cast<size_t>(shape.tokens) * shape.head_dim; }

  RowTransform Transform(TilePart part) const {
    const bool key = part == TilePart::kKey;
    const std::vector<float>& rotation = key ? rotation_k : rotation_v;
    const std::vector<float>& mean = key ? mean_k : mean_v;
    return {rotation.empty() ? nullptr : rotation.data(), mean.empty() ? nullptr : mean.data(),
            key ? clip_k : clip_v,
            /*feedback=*/nullptr, key && !dual_k.empty() ? dual_k.data() : nullptr};
  }

  std::vector<uint8_t> Quantize(uint32_t* status) const {
    std::vector<uint8_t> tile(shape.int2_bytes(), 0xa5);
    QuantizeParams params;
    params.shape = shape;
    params.k = k.data();
    params.v = v.data();
    params.k_stride = params.v_stride = shape.head_dim;
    params.k_transform = Transform(TilePart::kKey);
    params.v_transform = Transform(TilePart::kValue);
    params.tile = tile.data();
    *status = QuantizeTile(params);
    return tile;
  }
};

Window RandomWindow(const TileShape& shape, RandomData* random) {
  Window window(shape);
  window.k = random->Rows(window.elements());
  window.v = random->Rows(window.elements(), 0.3f);
  window.rotation_k = random->Orthogonal(shape.head_dim);
  window.rotation_v = random->Orthogonal(shape.head_dim);
  window.mean_k = random->Floats(shape.head_dim);
  window.mean_v = random->Floats(shape.head_dim, 0.1f);
  return window;
}

// Rows of one value, without rotation, mean or clip.
Window PlainWindow(const TileShape& shape, float value) {
  Window window(shape);
  window.k.assign(window.elements(), Bf16FromFloat(value));
  window.v = window.k;
  window.clip_k = window.clip_v = 0.0f;
  return window;
}

void ExpectRowMatchesReference(const Window& window, const std::vector<uint8_t>& tile,
                               TilePart part, int t) {
  const TileShape& shape = window.shape;
  const std::vector<Bf16>& rows = part == TilePart::kKey ? window.k : window.v;
  const reference::Row row =
      reference::QuantizeRow(shape, &rows[t * shape.head_dim], window.Transform(part));
  for (int y = 0; y < shape.groups(); ++y) {
    const RowMeta meta = ReadMeta(shape, tile.data(), part, t, y);
    // The tolerance is half a unit in the last place of fp16, plus the error of float arithmetic
    // before it.
    ASSERT_NEAR(Fp16ToFloat(meta.scale), row.scale[y], 5.0e-4 * row.scale[y] + 3e-8);
    ASSERT_NEAR(Fp16ToFloat(meta.minimum), row.minimum[y],
                5.0e-4 * std::abs(row.minimum[y]) + 2e-6);
  }
  for (int i = 0; i < shape.head_dim; ++i) {
    const int code = ReadCode(shape, tile.data(), part, t, i);
    ASSERT_NEAR(code, row.steps[i], 0.5 + 1e-4) << "token " << t << " channel " << i;
  }
}

using QuantizeTest = EachIsa;

INSTANTIATE_TEST_SUITE_P(Isas, QuantizeTest, testing::ValuesIn(kAllIsas), IsaNameOf);

TEST_P(QuantizeTest, MatchesTheDoublePrecisionReference) {
  RandomData random;
  for (const TileShape& shape : AllShapes()) {
    SCOPED_TRACE(Name(shape));
    const Window window = RandomWindow(shape, &random);
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    EXPECT_EQ(status, 0u);
    for (int t = 0; t < shape.tokens; t += 7) {
      ExpectRowMatchesReference(window, tile, TilePart::kKey, t);
      ExpectRowMatchesReference(window, tile, TilePart::kValue, t);
    }
  }
}

// The input is deterministic and without rotation; the digests come from another program.
TEST_P(QuantizeTest, GoldenBytes) {
  const std::pair<TileShape, uint64_t> goldens[] = {{{64, 128, 128}, 0xde35305979a498cfu},
                                                    {{64, 64, 32}, 0x2f7e53432e9c2b65u},
                                                    {{64, 256, 64}, 0x379052c67cfc043au},
                                                    {{32, 128, 64}, 0x6f0cb598c8b8837du},
                                                    {{128, 128, 32}, 0x9a7d4271c5d3e0e9u}};
  const auto rows = [](size_t count, uint32_t state) {
    std::vector<Bf16> out;
    for (size_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      const uint32_t v = state >> 8;
      const uint32_t bits = (v & 1) << 15 | (120 + (v >> 1 & 15)) << 7 | (v >> 5 & 127);
      out.push_back({static_cast<uint16_t>(bits)});
    }
    return out;
  };
  for (const auto& [shape, digest] : goldens) {
    SCOPED_TRACE(Name(shape));
    Window window(shape);
    window.k = rows(window.elements(), 1);
    window.v = rows(window.elements(), 2);
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    EXPECT_EQ(status, 0u);
    EXPECT_EQ(Fnv1a(tile.data(), tile.size()), digest);
  }
}

TEST_P(QuantizeTest, SameBytesAsPortable) {
  RandomData random;
  for (const TileShape& shape : AllShapes()) {
    SCOPED_TRACE(Name(shape));
    Window window = RandomWindow(shape, &random);
    // The rows have outliers, tiny and huge values, and values that are not finite.
    for (int i = 0; i < 40; ++i) {
      window.k[random.Below(window.elements())] = Bf16FromFloat(random.Normal(1e4f));
      window.v[random.Below(window.elements())].bits = static_cast<uint16_t>(random.Below(65536));
    }
    ExpectSameBytesAsPortable(window);
  }
}

TEST_P(QuantizeTest, DequantizeMatchesTheReferenceExactly) {
  RandomData random;
  for (const TileShape& shape : AllShapes()) {
    SCOPED_TRACE(Name(shape));
    const Window window = RandomWindow(shape, &random);
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    std::vector<float> k(window.elements()), v(window.elements());
    DequantizeTile(shape, tile.data(), k.data(), v.data());
    for (int t = 0; t < shape.tokens; ++t) {
      for (int i = 0; i < shape.head_dim; ++i) {
        const int at = t * shape.head_dim + i;
        const auto expected = [&](TilePart part) {
          return static_cast<float>(reference::Dequantize(shape, tile.data(), part, t, i));
        };
        ASSERT_EQ(k[at], expected(TilePart::kKey));
        ASSERT_EQ(v[at], expected(TilePart::kValue));
      }
    }
    std::vector<float> only(window.elements());
    DequantizeTile(shape, tile.data(), nullptr, only.data());
    EXPECT_EQ(only, v);
    DequantizeTile(shape, tile.data(), only.data(), nullptr);
    EXPECT_EQ(only, k);
  }
}

TEST_P(QuantizeTest, DequantizeToModelAddsTheMeanAndRotatesBack) {
  RandomData random;
  for (const TileShape& shape : AllShapes()) {
    SCOPED_TRACE(Name(shape));
    Window window = RandomWindow(shape, &random);
    const int d = shape.head_dim;
    // With columns stretched by s, keys come back through columns stretched by 1 / s.
    window.dual_k = window.rotation_k;
    for (int i = 0; i < d * d; ++i) {
      const float stretch = 0.5f + static_cast<float>(i % d) / static_cast<float>(d);
      window.rotation_k[i] *= stretch;
      window.dual_k[i] /= stretch;
    }
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    std::vector<float> y(window.elements()), k(window.elements()), v(window.elements());
    DequantizeTile(shape, tile.data(), y.data(), nullptr);
    DequantizeTileToModel(shape, tile.data(), window.Transform(TilePart::kKey),
                          window.Transform(TilePart::kValue), k.data(), v.data());
    for (int t = 0; t < shape.tokens; t += 9) {
      for (int i = 0; i < d; ++i) {
        double expected = 0.0;
        for (int j = 0; j < d; ++j) {
          expected +=
              (static_cast<double>(y[t * d + j]) + window.mean_k[j]) * window.dual_k[i * d + j];
        }
        ASSERT_NEAR(k[t * d + i], expected, 4e-5);
      }
    }
    // Two bits keep most of a row: the error is far below the row's norm.
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < v.size(); ++i) {
      const double x = Bf16ToFloat(window.v[i]);
      error += (v[i] - x) * (v[i] - x);
      norm += x * x;
    }
    EXPECT_LT(std::sqrt(error / norm), 0.5);
  }
}

TEST_P(QuantizeTest, ReadsRowsAtTheirStride) {
  RandomData random;
  const TileShape shape{64, 128, 128};
  const Window window = RandomWindow(shape, &random);
  uint32_t status = 0;
  const std::vector<uint8_t> expected = window.Quantize(&status);
  const int k_stride = 3 * 128, v_stride = 128 + 8;
  std::vector<Bf16> k = random.Rows(64 * k_stride), v = random.Rows(64 * v_stride);
  for (int t = 0; t < 64; ++t) {
    std::copy_n(&window.k[t * 128], 128, &k[t * k_stride]);
    std::copy_n(&window.v[t * 128], 128, &v[t * v_stride]);
  }
  std::vector<uint8_t> tile(shape.int2_bytes());
  QuantizeParams params;
  params.shape = shape;
  params.k = k.data();
  params.v = v.data();
  params.k_stride = k_stride;
  params.v_stride = v_stride;
  params.k_transform = window.Transform(TilePart::kKey);
  params.v_transform = window.Transform(TilePart::kValue);
  params.tile = tile.data();
  EXPECT_EQ(QuantizeTile(params), 0u);
  EXPECT_TRUE(tile == expected);
}

TEST_P(QuantizeTest, ConstantRowsAreExactToFp16) {
  for (const float value : {0.0f, 1.0f, -3.140625f, 1024.0f, -65280.0f, 0x1p-24f, 0x1p-14f}) {
    for (const TileShape& shape : AllShapes()) {
      const Window window = PlainWindow(shape, value);
      uint32_t status = 0;
      const std::vector<uint8_t> tile = window.Quantize(&status);
      EXPECT_EQ(status, 0u) << value;
      std::vector<float> k(window.elements()), v(window.elements());
      DequantizeTile(shape, tile.data(), k.data(), v.data());
      bool saturated = false;
      const float expected = Fp16ToFloat(Fp16FromFloat(value, &saturated));
      for (size_t i = 0; i < k.size(); ++i) {
        ASSERT_EQ(k[i], expected) << value;
        ASSERT_EQ(v[i], expected) << value;
      }
    }
  }
}

TEST_P(QuantizeTest, ConstantRowsStayExactUnderClip) {
  Window window = PlainWindow({64, 128, 64}, 2.5f);
  window.clip_k = window.clip_v = 0.92f;
  uint32_t status = 0;
  const std::vector<uint8_t> tile = window.Quantize(&status);
  std::vector<float> k(window.elements());
  DequantizeTile(window.shape, tile.data(), k.data(), nullptr);
  for (const float x : k) ASSERT_EQ(x, 2.5f);
}

TEST_P(QuantizeTest, ExtremeRowsSaturateAndAreReported) {
  for (const float extreme : {65536.0f, 1e9f, 3e38f}) {
    Window window = PlainWindow({64, 128, 32}, 1.0f);
    for (int i = 0; i < 128; ++i) {
      window.k[5 * 128 + i] = Bf16FromFloat(i % 2 == 0 ? extreme : -extreme);
    }
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    EXPECT_EQ(status, kStatusSaturated) << extreme;
    std::vector<float> k(window.elements());
    DequantizeTile(window.shape, tile.data(), k.data(), nullptr);
    for (int i = 0; i < 128; ++i) {
      const float x = k[5 * 128 + i];
      ASSERT_TRUE(std::isfinite(x));
      // The sign survives: the row alternates between maximum and minimum.
      ASSERT_EQ(x > 0.0f, i % 2 == 0) << extreme << " at " << i;
      ASSERT_EQ(k[4 * 128 + i], 1.0f);
    }
  }
}

TEST_P(QuantizeTest, SubnormalRowsAreFiniteAndSmall) {
  RandomData random;
  Window window = PlainWindow({64, 128, 128}, 0.0f);
  for (Bf16& x : window.k) x.bits = static_cast<uint16_t>(random.Below(0x80));
  uint32_t status = 0;
  const std::vector<uint8_t> tile = window.Quantize(&status);
  EXPECT_EQ(status, 0u);
  std::vector<float> k(window.elements());
  DequantizeTile(window.shape, tile.data(), k.data(), nullptr);
  for (const float x : k) ASSERT_EQ(x, 0.0f);
}

TEST_P(QuantizeTest, ClipKeepsOneOutlierFromTheOthers) {
  RandomData random;
  Window window = PlainWindow({64, 128, 128}, 0.0f);
  window.k = random.Rows(window.elements());
  window.clip_k = 0.96f;
  for (int t = 0; t < 64; ++t) window.k[t * 128 + 17] = Bf16FromFloat(1e4f);
  uint32_t status = 0;
  const std::vector<uint8_t> tile = window.Quantize(&status);
  for (int t = 0; t < 64; ++t) {
    // The range is that of the five largest other magnitudes, not of the outlier.
    EXPECT_LT(Fp16ToFloat(ReadMeta(window.shape, tile.data(), TilePart::kKey, t, 0).scale), 3.0f);
    EXPECT_EQ(ReadCode(window.shape, tile.data(), TilePart::kKey, t, 17), 3);
  }
}

TEST_P(QuantizeTest, RowsThatAreNotFiniteBecomeZeroAndDoNotSpread) {
  RandomData random;
  const uint16_t bad[] = {0x7f80, 0xff80, 0x7fc0, 0xffff};
  for (const TileShape& shape : {TileShape{64, 128, 128}, TileShape{32, 64, 32}}) {
    const Window clean = RandomWindow(shape, &random);
    uint32_t status = 0;
    const std::vector<uint8_t> expected = clean.Quantize(&status);
    ASSERT_EQ(status, 0u);
    for (const uint16_t bits : bad) {
      Window window = clean;
      const int row = random.Below(shape.tokens);
      window.k[row * shape.head_dim + random.Below(shape.head_dim)].bits = bits;
      const std::vector<uint8_t> tile = window.Quantize(&status);
      EXPECT_EQ(status, kStatusNonFinite);
      for (int t = 0; t < shape.tokens; ++t) {
        for (int i = 0; i < shape.head_dim; ++i) {
          const double was = reference::Dequantize(shape, expected.data(), TilePart::kKey, t, i);
          const double now = reference::Dequantize(shape, tile.data(), TilePart::kKey, t, i);
          ASSERT_EQ(now, t == row ? 0.0 : was);
          ASSERT_EQ(ReadCode(shape, tile.data(), TilePart::kValue, t, i),
                    ReadCode(shape, expected.data(), TilePart::kValue, t, i));
        }
      }
    }
  }
}

// Scale and minimum are finite for every input.
TEST_P(QuantizeTest, RandomBitsGiveFiniteTiles) {
  RandomData random;
  for (const TileShape& shape : AllShapes()) {
    Window window = RandomWindow(shape, &random);
    for (Bf16& x : window.k) x.bits = static_cast<uint16_t>(random.Below(65536));
    for (Bf16& x : window.v) {
      do {
        x.bits = static_cast<uint16_t>(random.Below(65536));
      } while ((x.bits & 0x7f80) == 0x7f80);
    }
    uint32_t status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    for (int t = 0; t < shape.tokens; ++t) {
      for (int y = 0; y < shape.groups(); ++y) {
        for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
          const RowMeta meta = ReadMeta(shape, tile.data(), part, t, y);
          ASSERT_TRUE(std::isfinite(Fp16ToFloat(meta.scale)));
          ASSERT_TRUE(std::isfinite(Fp16ToFloat(meta.minimum)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace crumb::kernels
