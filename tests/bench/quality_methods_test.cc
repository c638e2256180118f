// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares the published methods with their definitions, implemented again in double precision.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <set>

#include "bench/quality_methods/paged_cache.h"
#include "bench/quality_methods/window_codecs.h"
#include "calibration/calibrator.h"
#include "models/engine.h"

namespace crumb::bench {
namespace {

using kernels::TilePart;

constexpr int kTokens = 64;
constexpr int kDim = 128;

// Returns normal rows with one large channel and a mean, like keys.
WindowRows KeyLikeRows(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  WindowRows rows(kTokens, kDim);
  for (Eigen::Index i = 0; i < rows.size(); ++i) rows.data()[i] = normal(random);
  rows.col(17) *= 9.0f;
  rows.col(40).array() += 4.0f;
  return rows;
}

WindowRows RoundTrip(const WindowCodec& codec, TilePart part, const WindowRows& rows) {
  return codec.Decode(part, codec.Encode(part, rows), static_cast<int>(rows.rows()));
}

double BitsPerElement(const WindowCodec& codec, TilePart part) {
  return 8.0 * static_cast<double>(codec.Encode(part, KeyLikeRows(1)).size()) / (kTokens * kDim);
}

// The bound of the error: half a step of the group's range, and the rounding of fp16 scale and
// minimum.
float HalfStep(float least, float most, int levels) {
  return (most - least) / static_cast<float>(levels - 1) * 0.5f +
         2e-3f * std::max(std::abs(least), std::abs(most));
}

TEST(BitStreamTest, ReadsWhatWasWritten) {
  BitWriter out;
  out.Add(5, 3);
  const float half = out.AddHalf(-1.25f);
  out.Add(1, 1);
  out.Add(9, 4);
  const std::vector<uint8_t> bytes = out.Take();
  EXPECT_EQ(bytes.size(), 3u);
  BitReader in(bytes);
  EXPECT_EQ(in.Next(3), 5u);
  EXPECT_EQ(in.NextHalf(), half);
  EXPECT_EQ(half, -1.25f);
  EXPECT_EQ(in.Next(1), 1u);
  EXPECT_EQ(in.Next(4), 9u);
}

TEST(KiviTest, StoresTwoAndAHalfBits) {
  EXPECT_DOUBLE_EQ(BitsPerElement(Kivi(kDim), TilePart::kKey), 2.5);
  EXPECT_DOUBLE_EQ(BitsPerElement(Kivi(kDim), TilePart::kValue), 2.5);
}

TEST(KiviTest, KeysArePerChannelValuesPerToken) {
  const WindowRows rows = KeyLikeRows(2);
  const WindowRows keys = RoundTrip(Kivi(kDim), TilePart::kKey, rows);
  for (int c = 0; c < kDim; ++c) {
    const float bound = HalfStep(rows.col(c).minCoeff(), rows.col(c).maxCoeff(), 4);
    EXPECT_LE((rows.col(c) - keys.col(c)).cwiseAbs().maxCoeff(), bound) << c;
    std::set<float> levels(keys.col(c).begin(), keys.col(c).end());
    EXPECT_LE(levels.size(), 4u) << c;
  }
  const WindowRows values = RoundTrip(Kivi(kDim), TilePart::kValue, rows);
  for (int t = 0; t < kTokens; ++t) {
    for (int begin : {0, 64}) {
      const auto group = rows.row(t).segment(begin, 64);
      const auto stored = values.row(t).segment(begin, 64);
      EXPECT_LE((group - stored).cwiseAbs().maxCoeff(),
                HalfStep(group.minCoeff(), group.maxCoeff(), 4));
      std::set<float> levels(stored.begin(), stored.end());
      EXPECT_LE(levels.size(), 4u);
    }
  }
}

TEST(KiviTest, ConstantGroupsSurvive) {
  const WindowRows rows = WindowRows::Constant(kTokens, kDim, 1.5f);
  EXPECT_EQ(RoundTrip(Kivi(kDim), TilePart::kKey, rows), rows);
  EXPECT_EQ(RoundTrip(Kivi(kDim), TilePart::kValue, WindowRows::Zero(kTokens, kDim)),
            WindowRows::Zero(kTokens, kDim));
}

TEST(Int4HadamardTest, RoundsBehindTheRotation) {
  const Int4Hadamard codec(kDim);
  EXPECT_DOUBLE_EQ(BitsPerElement(codec, TilePart::kKey), 4.25);
  const WindowRows rows = KeyLikeRows(3);
  const WindowRows stored = RoundTrip(codec, TilePart::kKey, rows);
  for (int t = 0; t < kTokens; ++t) {
    std::vector<double> rotated(kDim), back(kDim);
    double least = 1e9, most = -1e9;
    for (int j = 0; j < kDim; ++j) {
      for (int i = 0; i < kDim; ++i) {
        const double h = std::popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? 1.0 : -1.0;
        rotated[j] += h / std::sqrt(kDim) * rows(t, i);
        back[j] += h / std::sqrt(kDim) * stored(t, i);
      }
      least = std::min(least, rotated[j]);
      most = std::max(most, rotated[j]);
    }
    for (int j = 0; j < kDim; ++j) {
      EXPECT_NEAR(rotated[j], back[j],
                  HalfStep(static_cast<float>(least), static_cast<float>(most), 16));
    }
  }
}

// In many dimensions a coordinate is normal with variance 1 / dim; Max (1960) has the levels of the
// optimal quantizers of the normal distribution.
TEST(TurboQuantTest, CodebooksAreTheOptimalOnes) {
  const std::vector<double> two = {-1.510, -0.4528, 0.4528, 1.510};
  const std::vector<double> three = {-2.152, -1.344, -0.7560, -0.2451,
                                     0.2451, 0.7560, 1.344,   2.152};
  for (const auto& [bits, known] : {std::pair(2, two), std::pair(3, three)}) {
    const std::vector<double> levels = SphereCodebook(2048, bits);
    ASSERT_EQ(levels.size(), known.size());
    for (size_t i = 0; i < levels.size(); ++i) {
      EXPECT_NEAR(levels[i] * std::sqrt(2048.0), known[i], 0.01) << bits << " " << i;
    }
  }
}

TEST(TurboQuantTest, BitsAreThoseOfThePaper) {
  EXPECT_DOUBLE_EQ(BitsPerElement(TurboQuant(kDim, TurboQuant::Keys::kProduct), TilePart::kKey),
                   3.25);
  EXPECT_DOUBLE_EQ(BitsPerElement(TurboQuant(kDim, TurboQuant::Keys::kProduct), TilePart::kValue),
                   3.125);
  EXPECT_DOUBLE_EQ(BitsPerElement(TurboQuant(kDim, TurboQuant::Keys::kMse), TilePart::kKey), 3.125);
}

// The paper's distortion with 3 bits is a squared error of 0.0345 relative to the row; 2 bits and
// signs are unbiased for inner products.
TEST(TurboQuantTest, ErrorsAreThoseOfThePaper) {
  const TurboQuant mse(kDim, TurboQuant::Keys::kMse);
  const TurboQuant product(kDim, TurboQuant::Keys::kProduct);
  double error = 0.0, norm = 0.0, own = 0.0, sketched = 0.0, shrunk = 0.0;
  for (uint32_t seed = 0; seed < 8; ++seed) {
    const WindowRows rows = KeyLikeRows(seed);
    const WindowRows by_mse = RoundTrip(mse, TilePart::kKey, rows);
    const WindowRows by_product = RoundTrip(product, TilePart::kKey, rows);
    error += (rows - by_mse).squaredNorm();
    norm += rows.squaredNorm();
    own += rows.cwiseProduct(rows).sum();
    shrunk += rows.cwiseProduct(by_mse).sum();
    sketched += rows.cwiseProduct(by_product).sum();
  }
  EXPECT_NEAR(error / norm, 0.0345, 0.002);
  EXPECT_NEAR(shrunk / own, 1.0 - 0.0345, 0.003);  // the best levels shrink a row
  EXPECT_NEAR(sketched / own, 1.0, 0.006);
}

class PagedCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    auto engine = models::Engine::Load("models/data/tiny-lm", {.threads = 1});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    std::mt19937 random(5);
    for (int i = 0; i < 640; ++i) tokens_.push_back(static_cast<int32_t>(300 + random() % 900));
  }

  models::Logits Run(MethodCache& cache) {
    models::Logits last;
    const std::span<const int32_t> all = tokens_;
    for (size_t begin = 0; begin < all.size(); begin += 64) {
      auto logits = engine_->Forward(cache, all.subspan(begin, 64), models::LogitRows::kAll);
      EXPECT_TRUE(logits.ok()) << logits.status();
      last = *std::move(logits);
    }
    return last;
  }

  client::WorkerOptions WorkerFor() const {
    client::WorkerOptions worker;
    worker.model = worker.weights = "test";
    worker.layers = engine_->config().layers;
    worker.kv_heads = engine_->config().kv_heads;
    worker.q_heads = engine_->config().q_heads;
    worker.head_dim = kDim;
    worker.draft_slots = 63;
    return worker;
  }

  std::unique_ptr<models::Engine> engine_;
  std::vector<int32_t> tokens_;
};

// The client's sequence is the definition, with the same segments, bytes and numbers.
TEST_F(PagedCacheTest, TilesAreAttendedAsAWorkerDoes) {
  const auto file = calibration::HadamardRotations(kDim);
  ASSERT_TRUE(file.ok());
  client::WorkerOptions options = WorkerFor();
  options.rotations = *client::RotationSet::FromFile(*file, "hadamard");
  options.clip_k = file->clip_k;
  options.clip_v = file->clip_v;
  const auto worker = client::Worker::Open(options, nullptr);
  ASSERT_TRUE(worker.ok()) << worker.status();
  const auto theirs = WorkerCache::Begin(**worker, std::span<const int32_t>(tokens_).first(64));
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  PagedCacheOptions pages;
  pages.model = engine_->config();
  pages.context = static_cast<int>(tokens_.size());
  pages.int2 = true;
  pages.layers = options.rotations.Expand(options.layers, options.kv_heads);
  pages.clip_k = file->clip_k;
  pages.clip_v = file->clip_v;
  PagedCache ours(pages);
  const models::Logits expected = Run(**theirs), found = Run(ours);
  ASSERT_EQ(expected.values.size(), found.values.size());
  for (size_t i = 0; i < expected.values.size(); ++i) {
    ASSERT_NEAR(expected.values[i], found.values[i], 1e-3) << i;
  }
  EXPECT_EQ(ours.window_bytes(), 4608u);
}

// Without a codec nothing is lost, with a codec history loses precision. A fork is independent.
TEST_F(PagedCacheTest, CodecsChangeHistoryOnly) {
  PagedCacheOptions exact;
  exact.model = engine_->config();
  exact.context = static_cast<int>(tokens_.size()) + 1;
  PagedCacheOptions kivi = exact;
  kivi.codecs = {std::make_shared<Kivi>(kDim)};
  PagedCache plain(exact), coded(kivi);
  const models::Logits expected = Run(plain), found = Run(coded);
  double most = 0.0;
  for (size_t i = 0; i < expected.values.size(); ++i) {
    most = std::max<double>(most, std::abs(expected.values[i] - found.values[i]));
  }
  EXPECT_GT(most, 0.05);
  EXPECT_EQ(coded.window_bytes(), 2u * kTokens * kDim * 5 / 16);
  const auto fork = coded.Fork();
  ASSERT_TRUE(fork.ok());
  ASSERT_TRUE(engine_->Forward(**fork, {tokens_.data(), 1}, models::LogitRows::kLast).ok());
  EXPECT_EQ((*fork)->length(), 641);
  EXPECT_EQ(coded.length(), 640);
  const auto over = engine_->Forward(**fork, {tokens_.data(), 1}, models::LogitRows::kLast);
  EXPECT_EQ(over.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace crumb::bench
