// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares KVarN and Block-GTQ with their definitions, and the rows that OptR stores with tiles.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "bench/quality_methods/block_gtq.h"
#include "bench/quality_methods/kvarn.h"
#include "bench/quality_methods/paged_cache.h"
#include "bench/quality_methods/rotated_int2.h"
#include "calibration/eigenbasis.h"
#include "kernels/bf16.h"
#include "kernels/quantize.h"
#include "tests/bench/random_rows.h"

namespace crumb::bench {
namespace {

using kernels::Bf16;
using kernels::TilePart;

constexpr int kDim = 128;

double BitsPerElement(const WindowCodec& codec, TilePart part) {
  const WindowRows rows = NormalRows(codec.window_tokens(), kDim, 1);
  return 8.0 * static_cast<double>(codec.Encode(part, rows).size()) /
         static_cast<double>(rows.size());
}

// Returns the largest over the smallest standard deviation of columns.
float DeviationRatio(const WindowRows& tile) {
  std::vector<float> deviations;
  for (Eigen::Index j = 0; j < tile.cols(); ++j) {
    const float mean = tile.col(j).mean();
    deviations.push_back(std::sqrt((tile.col(j).array() - mean).square().mean()));
  }
  const auto [least, most] = std::minmax_element(deviations.begin(), deviations.end());
  return *most / *least;
}

TEST(KvarnTest, BalancingUndoesScalesOfBothAxes) {
  WindowRows tile = NormalRows(128, 64, 2);
  for (int i = 0; i < 128; ++i) tile.row(i) *= std::exp(0.02f * static_cast<float>(i));
  for (int j = 0; j < 64; ++j) tile.col(j) *= std::exp(-0.05f * static_cast<float>(j));
  EXPECT_GT(DeviationRatio(tile), 10.0f);
  const TileScales scales = BalanceVariance(tile);
  const WindowRows balanced =
      scales.row.cwiseInverse().asDiagonal() * tile * scales.column.cwiseInverse().asDiagonal();
  EXPECT_LT(DeviationRatio(balanced), 1.01f);
  EXPECT_LT(DeviationRatio(balanced.transpose()), 1.01f);
}

TEST(KvarnTest, StoresStepsMinimumsAndOneScale) {
  const Kvarn codec(kDim);
  EXPECT_EQ(codec.window_tokens(), 128);
  EXPECT_DOUBLE_EQ(BitsPerElement(codec, TilePart::kKey), 2.375);
  EXPECT_DOUBLE_EQ(BitsPerElement(codec, TilePart::kValue), 2.375);
  // With fewer channels there are fewer steps of keys, and fewer scales of values.
  const WindowRows narrow = NormalRows(128, 64, 3);
  EXPECT_EQ(Kvarn(64).Encode(TilePart::kKey, narrow).size(), 128u * 64 / 4 + 128 * 2 + 64 * 4);
  EXPECT_EQ(Kvarn(64).Encode(TilePart::kValue, narrow).size(), 128u * 64 / 4 + 64 * 2 + 128 * 4);
}

// Reads the bytes as the header describes them and checks the rounding behind the rotation.
TEST(KvarnTest, CodesAreTheNearestBehindScaleAndRotation) {
  const Kvarn codec(kDim);
  WindowRows rows = NormalRows(128, kDim, 4);
  rows.col(9) *= 8.0f;
  for (int t = 0; t < 128; t += 5) rows.row(t) *= 6.0f;
  const WindowRows rotated = rows * calibration::HadamardMatrix(kDim).cast<float>();
  for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
    const bool keys = part == TilePart::kKey;
    const std::vector<uint8_t> bytes = codec.Encode(part, rows);
    const WindowRows decoded = codec.Decode(part, bytes, 128);
    const WindowRows back = decoded * calibration::HadamardMatrix(kDim).cast<float>();
    BitReader in(bytes);
    std::vector<double> scale(128);
    for (double& s : scale) s = in.NextHalf();
    for (int line = 0; line < 128; ++line) {
      const double step = in.NextHalf(), minimum = in.NextHalf();
      for (int at = 0; at < 128; ++at) {
        const int t = keys ? at : line, c = keys ? line : at;
        const double level = (minimum + step * in.Next(2)) * scale[at];
        ASSERT_NEAR(back(t, c), level, 1e-4 * (1.0 + std::abs(level)));
        ASSERT_NEAR(rotated(t, c), level, (0.5 * step + 4e-3 * std::abs(minimum)) * scale[at]);
      }
    }
  }
}

// The method is for windows in which a few tokens are much larger than the others.
TEST(KvarnTest, LargeTokensDoNotCostTheOthersTheirPrecision) {
  WindowRows rows = NormalRows(128, kDim, 5);
  const auto error = [&](const WindowCodec& codec) {
    const WindowRows stored = codec.Decode(TilePart::kKey, codec.Encode(TilePart::kKey, rows), 128);
    return (rows - stored).topRows(100).squaredNorm() / rows.topRows(100).squaredNorm();
  };
  const float even = error(Kvarn(kDim));
  rows.bottomRows(28) *= 10.0f;
  EXPECT_LT(error(Kvarn(kDim)), 1.1f * even);
  EXPECT_GT(error(Kivi(kDim)), 4.0f * even);
}

double WeightedError(const std::vector<double>& energy, const std::vector<int>& bits) {
  double sum = 0.0;
  for (size_t i = 0; i < bits.size(); ++i) sum += energy[i] * std::pow(4.0, -bits[i]);
  return sum;
}

TEST(BlockGtqTest, AllocationIsTheBestOfAll) {
  const std::vector<double> energy = {0.3, 40.0, 2.0, 9.0, 0.001};
  for (const int budget : {5, 9, 12, 20}) {
    const std::vector<int> bits = AllocateBits(energy, budget, 1, 4);
    int sum = 0;
    for (const int b : bits) sum += b;
    EXPECT_EQ(sum, budget);
    double best = 1e9;
    for (int code = 0; code < 1024; ++code) {  // two bits per block
      std::vector<int> other;
      int spent = 0;
      for (int i = 0; i < 5; ++i) spent += other.emplace_back(1 + (code >> 2 * i & 3));
      if (spent == budget) best = std::min(best, WeightedError(energy, other));
    }
    EXPECT_DOUBLE_EQ(WeightedError(energy, bits), best) << budget;
    for (size_t i = 0; i < energy.size(); ++i) {
      for (size_t j = 0; j < energy.size(); ++j) {
        EXPECT_TRUE(energy[i] <= energy[j] || bits[i] >= bits[j]) << i << " " << j;
      }
    }
  }
}

TEST(BlockGtqTest, GroupsKeepTheirNormsAndStoreTheirBits) {
  std::vector<int> bits(kDim / 2, 1);
  for (int i = 0; i < 16; ++i) bits[3 * i] = 4;
  bits[1] = 8;
  SphereCodebooks codebooks;
  const BlockGtq codec(bits, 2, codebooks);
  const double codes = 2.0 * (16 * 4 + 8 + 47);
  EXPECT_DOUBLE_EQ(BitsPerElement(codec, TilePart::kKey), (codes + 3 * 16) / kDim);
  EXPECT_DOUBLE_EQ(BitsPerElement(codec, TilePart::kValue), 2.0 + 16.0 / kDim);
  const WindowRows rows = NormalRows(64, kDim, 6);
  const WindowRows stored = codec.Decode(TilePart::kKey, codec.Encode(TilePart::kKey, rows), 64);
  double error[9] = {}, energy[9] = {};
  for (int t = 0; t < 64; ++t) {
    double norm[9] = {}, kept[9] = {};
    for (int c = 0; c < kDim; ++c) {
      const int b = bits[c % 64];
      norm[b] += rows(t, c) * rows(t, c);
      kept[b] += stored(t, c) * stored(t, c);
      error[b] += std::pow(rows(t, c) - stored(t, c), 2);
      energy[b] += rows(t, c) * rows(t, c);
    }
    for (const int b : {1, 4, 8}) EXPECT_NEAR(std::sqrt(kept[b] / norm[b]), 1.0, 1e-3);
  }
  // Max (1960): relative errors of the best quantizers are .363 and .0095; with the norm kept the
  // first becomes 2 - 2 sqrt(1 - .363).
  EXPECT_NEAR(error[1] / energy[1], 0.404, 0.02);
  EXPECT_NEAR(error[4] / energy[4], 0.0095, 0.002);
  EXPECT_LT(error[8] / energy[8], 1e-3);
}

TEST(BlockGtqTest, BlocksDoNotMix) {
  std::vector<int> bits(kDim / 2, 2);
  bits[5] = 4;
  SphereCodebooks codebooks;
  const BlockGtq codec(bits, 2, codebooks);
  WindowRows rows = WindowRows::Zero(64, kDim);
  rows.col(5).setConstant(2.0f);
  rows.col(5 + 64).setConstant(-1.0f);
  const WindowRows stored = codec.Decode(TilePart::kKey, codec.Encode(TilePart::kKey, rows), 64);
  EXPECT_NEAR(stored(7, 5), 2.0f, 0.3f);
  EXPECT_NEAR(stored(7, 69), -1.0f, 0.3f);
  WindowRows rest = stored;
  rest.col(5).setZero();
  rest.col(69).setZero();
  EXPECT_EQ(rest, WindowRows::Zero(64, kDim));
}

TEST(BlockGtqTest, EnergiesAreMeansOfQueriesAndKeys) {
  FakeSource source(2, 400);
  const auto energies = BlockEnergies(source);
  ASSERT_TRUE(energies.ok()) << energies.status();
  ASSERT_EQ(energies->size(), 4u);
  // The sums are over 800 tokens: |q|^2 and |k|^2 of a pair are 2, with the offset 27.
  for (int item = 0; item < 4; ++item) {
    const double scale = item < 2 ? 1.0 : 4.0;
    for (int block = 0; block < 4; ++block) {
      const double expected = 800 * (2.0 * scale + (block == 3 ? 12.5 : 0.0));
      EXPECT_NEAR((*energies)[item][block], expected, 0.1 * expected) << item << " " << block;
    }
  }
}

// The tile codec of the kernels is the definition of OSCAR's rounding.
TEST(RotatedInt2Test, StoresWhatATileStores) {
  WindowRows keys = NormalRows(64, kDim, 7), values = NormalRows(64, kDim, 8);
  keys.col(3) *= 7.0f;
  std::vector<Bf16> k(keys.size()), v(values.size());
  for (size_t i = 0; i < k.size(); ++i) {
    k[i] = kernels::Bf16FromFloat(keys.data()[i]);
    v[i] = kernels::Bf16FromFloat(values.data()[i]);
    keys.data()[i] = kernels::Bf16ToFloat(k[i]);
    values.data()[i] = kernels::Bf16ToFloat(v[i]);
  }
  const WindowRows rotation = RandomOrthogonal(kDim, 9);
  const Eigen::RowVectorXf mean = NormalRows(1, kDim, 10).row(0), none = 0.0f * mean;
  const Eigen::RowVectorXf rotated_mean = mean * rotation, rotated_none = none;
  kernels::QuantizeParams params;
  params.shape = {.tokens = 64, .head_dim = kDim, .group_size = kDim};
  params.k = k.data();
  params.v = v.data();
  params.k_stride = params.v_stride = kDim;
  params.k_transform = {.rotation = rotation.data(), .mean = rotated_mean.data(), .clip = 0.96f};
  params.v_transform = {.rotation = rotation.data(), .mean = rotated_none.data(), .clip = 0.92f};
  alignas(128) uint8_t tile[8192];
  ASSERT_LE(params.shape.int2_bytes(), sizeof(tile));
  params.tile = tile;
  kernels::QuantizeTile(params);
  WindowRows tile_k(64, kDim), tile_v(64, kDim);
  kernels::DequantizeTileToModel(params.shape, tile, params.k_transform, params.v_transform,
                                 tile_k.data(), tile_v.data());
  const RotatedInt2 codec({.rotation = rotation, .mean = mean, .clip = 0.96f},
                          {.rotation = rotation, .mean = none, .clip = 0.92f});
  const std::vector<uint8_t> k_bytes = codec.Encode(TilePart::kKey, keys);
  const std::vector<uint8_t> v_bytes = codec.Encode(TilePart::kValue, values);
  EXPECT_EQ(k_bytes.size() + v_bytes.size(), params.shape.int2_bytes());
  // A value between two levels may round to either.
  const WindowRows own_k = codec.Decode(TilePart::kKey, k_bytes, 64);
  const WindowRows own_v = codec.Decode(TilePart::kValue, v_bytes, 64);
  EXPECT_LT((own_k - tile_k).norm() / tile_k.norm(), 0.01f);
  EXPECT_LT((own_v - tile_v).norm() / tile_v.norm(), 0.01f);
}

// Counts its windows and stores nothing but zeros.
class CountingCodec : public WindowCodec {
 public:
  explicit CountingCodec(int tokens) : tokens_(tokens) {}
  int window_tokens() const override { return tokens_; }
  std::vector<uint8_t> Encode(TilePart, const WindowRows& rows) const override {
    EXPECT_EQ(rows.rows(), tokens_);
    ++windows_;
    return std::vector<uint8_t>(3);
  }
  WindowRows Decode(TilePart, const std::vector<uint8_t>&, int tokens) const override {
    return WindowRows::Zero(tokens, 8);
  }
  int windows() const { return windows_; }

 private:
  const int tokens_;
  mutable std::atomic<int> windows_{0};
};

class CodecWindowsTest : public testing::Test {
 protected:
  // Appends tokens in steps of 64 to a model of one layer with two KV heads.
  void Append(PagedCacheOptions& options, int tokens) {
    options.model.layers = 1;
    options.model.kv_heads = options.model.q_heads = 2;
    options.model.head_dim = 8;
    options.context = tokens;
    PagedCache cache(options);
    const std::vector<Bf16> rows(64 * 16, kernels::Bf16FromFloat(1.0f));
    const std::vector<int32_t> ids(64);
    for (int t = 0; t < tokens; t += 64) {
      ASSERT_TRUE(cache.Append(0, 64, rows.data(), rows.data()).ok());
      ASSERT_TRUE(cache.Advance(ids).ok());
    }
  }
};

// In the pass that begins at 512 the history ends at 256: three pages behind the sink, and one
// window of two pages.
TEST_F(CodecWindowsTest, AWindowIsStoredWhenAllOfItHasLeft) {
  for (const auto& [tokens, windows] : {std::pair(64, 3), std::pair(128, 1)}) {
    const auto codec = std::make_shared<CountingCodec>(tokens);
    PagedCacheOptions options;
    options.codecs = {codec};
    Append(options, 576);
    EXPECT_EQ(codec->windows(), windows * 2 * 2) << tokens;
  }
}

TEST_F(CodecWindowsTest, EveryHeadHasItsCodec) {
  const auto first = std::make_shared<CountingCodec>(64);
  const auto second = std::make_shared<CountingCodec>(64);
  PagedCacheOptions options;
  options.codecs = {first, second};
  Append(options, 576);
  EXPECT_EQ(first->windows(), 3 * 2);
  EXPECT_EQ(second->windows(), 3 * 2);
}

}  // namespace
}  // namespace crumb::bench
