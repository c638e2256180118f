// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/calibrator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/bf16.h"

namespace crumb::calibration {
namespace {

using kernels::Bf16;

// Two layers of random activations with means, in sequences of one length, without RoPE.
class RandomSource : public ActivationSource {
 public:
  RandomSource(int sequences, int tokens) : sequences_(sequences), tokens_(tokens) {
    shape_ = {.name = "random",
              .rope = "none",
              .layers = 2,
              .q_heads = 4,
              .kv_heads = 2,
              .head_dim = 64,
              .rotary = HalfSplitPairs(64, {})};
  }

  const ModelShape& shape() const override { return shape_; }

  int layers_per_walk() const override { return layers_per_walk_; }
  int64_t visits() const override { return int64_t{1} * sequences_ * shape_.layers; }

  absl::Status ForEach(int first, int count, const Visitor& visit) override {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int s = 0; s < sequences_; ++s) {
      for (int layer = 0; layer < shape_.layers; ++layer) {
        const auto rows = [&](int heads, float mean) {
          std::vector<Bf16> out(static_cast<size_t>(tokens_) * heads * shape_.head_dim);
          for (size_t i = 0; i < out.size(); ++i) {
            const float spread = std::pow(0.95f, static_cast<float>(i % shape_.head_dim));
            out[i] = kernels::Bf16FromFloat(mean + spread * normal(random));
          }
          return out;
        };
        std::vector<Bf16> q = rows(4, 0.0f);
        const std::vector<Bf16> k = rows(2, 2.0f), v = rows(2, -1.0f);
        if (poisoned_ && s == 1) q[12345].bits = 0x7fc0;
        if (layer < first || layer >= first + count) continue;
        const absl::Status status =
            visit({.layer = layer, .tokens = tokens_, .q = q.data(), .k = k.data(), .v = v.data()});
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  void Poison() { poisoned_ = true; }
  void SetLayersPerWalk(int layers) { layers_per_walk_ = layers; }

 private:
  ModelShape shape_;
  int sequences_;
  int tokens_;
  bool poisoned_ = false;
  int layers_per_walk_ = 2;
};

// Weights of values' errors that fall from channel to channel.
absl::StatusOr<std::vector<Eigen::MatrixXd>> SteepHessians(int layer) {
  Eigen::VectorXd steep(64);
  for (int i = 0; i < 64; ++i) steep[i] = std::pow(0.9, i) * (1 + layer);
  return std::vector<Eigen::MatrixXd>(2, Eigen::MatrixXd(steep.asDiagonal()));
}

CalibrationOptions CrumbOptions() {
  CalibrationOptions options = DefaultCalibration(kernels::Method::kCrumb);
  options.positions = 2048;
  options.position_blocks = 4;
  return options;
}

TEST(CalibratorTest, CrumbFileHasEverythingPerHead) {
  RandomSource source(4, 640);
  double last = 0.0;
  const auto file = Calibrate(source, CrumbOptions(), [&](double done) {
    EXPECT_GE(done, last);
    last = done;
  });
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(last, 1.0);
  EXPECT_EQ(file->method, "crumb");
  EXPECT_EQ(file->tokens, 4 * (640 - 64));
  EXPECT_EQ(file->position_blocks, 4);
  EXPECT_EQ(file->pages_per_position_block, 8);
  EXPECT_EQ(file->rotation_k.size(), 2u * 2 * 64 * 64);
  EXPECT_EQ(file->feedback_k.size(), 2u * 2 * 64 * 64);
  EXPECT_EQ(file->mean_k.size(), 2u * 2 * 4 * 64);
  EXPECT_EQ(file->mean_v.size(), 2u * 2 * 64);
  EXPECT_EQ(file->shift.size(), 2u * 4);
  for (const float mean : file->mean_k) EXPECT_NEAR(mean, 2.0, 0.15);
  for (const float mean : file->mean_v) EXPECT_NEAR(mean, -1.0, 0.15);
  // Noise in keys increases the mass of history and never decreases it.
  for (const float shift : file->shift) {
    EXPECT_GT(shift, 0.0f);
    EXPECT_LT(shift, 2.0f);
  }
  // diag(Q' C Q) is constant in the stored file.
  for (int head = 0; head < 4; ++head) {
    using RowMajor = Eigen::Matrix<float, 64, 64, Eigen::RowMajor>;
    const Eigen::MatrixXd r =
        Eigen::Map<const RowMajor>(&file->dual_k[head * 64 * 64]).cast<double>();
    const Eigen::MatrixXd c =
        Eigen::Map<const RowMajor>(&file->covariance_k[head * 64 * 64]).cast<double>();
    const Eigen::VectorXd diagonal = (r.transpose() * c * r).diagonal();
    EXPECT_LE((diagonal.array() / diagonal.mean() - 1.0).abs().maxCoeff(), 1e-5);
  }
}

// The matrix of one head in an array of [heads, 64, 64].
Eigen::MatrixXd HeadMatrix(const std::vector<float>& array, int head) {
  using RowMajor = Eigen::Matrix<float, 64, 64, Eigen::RowMajor>;
  return Eigen::Map<const RowMajor>(&array[head * 64 * 64]).cast<double>();
}

// R Q' = I, diag(Q' C Q) is constant, and the rows' covariance is nearly a multiple of I: that of
// RandomSource is diagonal, .95^2i in channel i.
TEST(CalibratorTest, WhiteningMakesBasesWithDualsAndAMetric) {
  RandomSource source(4, 640);
  CalibrationOptions options = CrumbOptions();
  options.whitening_k = options.whitening_v = 1.0;
  options.value_hessians = SteepHessians;
  double last = 0.0;
  const auto file = Calibrate(source, options, [&](double done) { last = done; });
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(last, 1.0);
  ASSERT_EQ(file->dual_k.size(), 2u * 2 * 64 * 64);
  ASSERT_EQ(file->dual_v.size(), 2u * 2 * 64 * 64);
  EXPECT_TRUE(file->covariance_v.empty());
  Eigen::VectorXd rows(64);
  for (int i = 0; i < 64; ++i) rows[i] = std::pow(0.95, 2 * i);
  for (int head = 0; head < 4; ++head) {
    const Eigen::MatrixXd c = HeadMatrix(file->covariance_k, head);
    const Eigen::MatrixXd q = HeadMatrix(file->dual_k, head);
    const Eigen::VectorXd diagonal = (q.transpose() * c * q).diagonal();
    EXPECT_LE((diagonal.array() / diagonal.mean() - 1.0).abs().maxCoeff(), 1e-5);
    for (const auto& [rotation, dual] : {std::pair{&file->rotation_k, &file->dual_k},
                                         std::pair{&file->rotation_v, &file->dual_v}}) {
      const Eigen::MatrixXd r = HeadMatrix(*rotation, head);
      EXPECT_LE((r * HeadMatrix(*dual, head).transpose() - Eigen::MatrixXd::Identity(64, 64))
                    .cwiseAbs()
                    .maxCoeff(),
                1e-5);
      const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> white(r.transpose() * rows.asDiagonal() *
                                                                 r);
      // The ratio is 27 without whitening. 2,304 rows determine it to about 1.4; damping keeps the
      // weakest channels below the others.
      EXPECT_LT(white.eigenvalues()[63] / white.eigenvalues()[32], 2.0);
    }
    EXPECT_GT(HeadMatrix(file->feedback_k, head).diagonal().minCoeff(), 0.0);
    EXPECT_GT(HeadMatrix(file->feedback_v, head).diagonal().minCoeff(), 0.0);
  }
}

TEST(CalibratorTest, WithoutWhiteningThereIsNoDualAndNoMetric) {
  RandomSource source(3, 640);
  CalibrationOptions options = CrumbOptions();
  options.whitening_k = options.whitening_v = 0.0;
  const auto file = Calibrate(source, options, nullptr);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->dual_k.empty() && file->dual_v.empty() && file->feedback_v.empty());
  for (int head = 0; head < 4; ++head) {
    EXPECT_EQ(HeadMatrix(file->feedback_k, head).diagonal().cwiseAbs().maxCoeff(), 0.0);
  }
}

TEST(CalibratorTest, OptionsHaveRanges) {
  RandomSource source(3, 640);
  const auto code = [&source](double CalibrationOptions::*option, double value) {
    CalibrationOptions options = CrumbOptions();
    options.*option = value;
    return Calibrate(source, options, nullptr).status().code();
  };
  for (const double value : {-0.1, 1001.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(code(&CalibrationOptions::whitening_k, value), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(code(&CalibrationOptions::whitening_v, value), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(code(&CalibrationOptions::query_floor, value), absl::StatusCode::kInvalidArgument);
  }
}

// A floor brings the weights of keys' errors nearer to those of a basis in which all queries are
// alike, whose feedback is Q' Q.
TEST(CalibratorTest, AQueryFloorLevelsTheWeights) {
  std::vector<double> gains;
  for (const double floor : {0.0, 0.5, 1000.0}) {
    RandomSource source(3, 640);
    CalibrationOptions options = CrumbOptions();
    options.query_floor = floor;
    const auto file = Calibrate(source, options, nullptr);
    ASSERT_TRUE(file.ok()) << file.status();
    const Eigen::MatrixXd q = HeadMatrix(file->dual_k, 0);
    Eigen::MatrixXd weights = HeadMatrix(file->covariance_k, 0);
    weights.diagonal().array() += floor * weights.diagonal().mean();
    Eigen::MatrixXd expected = q.transpose() * weights * q;
    expected /= expected.diagonal().mean();
    expected.diagonal().array() += options.damp;
    const Eigen::MatrixXd both = HeadMatrix(file->feedback_k, 0);
    Eigen::MatrixXd unit = both.triangularView<Eigen::StrictlyUpper>();
    unit.diagonal().setOnes();
    const Eigen::MatrixXd got = unit * both.diagonal().asDiagonal() * unit.transpose();
    EXPECT_LE((got - expected).cwiseAbs().maxCoeff(), 1e-4) << floor;
    gains.push_back(both.diagonal().mean());
  }
  EXPECT_LT(gains[0], gains[1]);
}

// The file is the same layer by layer or at once, on one thread or several.
TEST(CalibratorTest, LayersPerWalkAndThreadsChangeNothing) {
  RandomSource together(3, 640), apart(3, 640);
  apart.SetLayersPerWalk(1);
  CalibrationOptions threads = CrumbOptions();
  threads.parallel_for = [](int count, const std::function<void(int)>& body) {
    std::vector<std::thread> running;
    for (int i = 0; i < count; ++i) running.emplace_back(body, i);
    for (std::thread& thread : running) thread.join();
  };
  const auto a = Calibrate(together, CrumbOptions(), nullptr);
  double last = 0.0;
  const auto b = Calibrate(apart, threads, [&last](double done) {
    EXPECT_GT(done, last);
    last = done;
  });
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  EXPECT_EQ(last, 1.0);
  EXPECT_EQ(RotationDigest(*a), RotationDigest(*b));
}

TEST(CalibratorTest, ValueHessiansMakeFeedbackForValues) {
  RandomSource source(3, 640);
  CalibrationOptions options = CrumbOptions();
  options.value_hessians = SteepHessians;
  options.whitening_v = 0.0;
  const auto file = Calibrate(source, options, nullptr);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->feedback_v.size(), 2u * 2 * 64 * 64);
  // D of (I + U) D (I + U)' is diagonal for the Hessian in the rotated basis.
  using RowMajor = Eigen::Matrix<float, 64, 64, Eigen::RowMajor>;
  for (int head = 0; head < 4; ++head) {
    const auto at = [&](const std::vector<float>& values) {
      return Eigen::MatrixXd(Eigen::Map<const RowMajor>(&values[head * 64 * 64]).cast<double>());
    };
    const Eigen::MatrixXd r = at(file->rotation_v);
    Eigen::MatrixXd weights = r.transpose() * (*options.value_hessians(0))[0] * r;
    weights /= weights.diagonal().mean();
    weights.diagonal().array() += options.damp;
    const Eigen::MatrixXd inverse =
        (Eigen::MatrixXd::Identity(64, 64) + at(file->feedback_v)).inverse();
    Eigen::MatrixXd diagonal = inverse * weights * inverse.transpose();
    EXPECT_LT(diagonal.diagonal().mean(), 0.9 * weights.diagonal().mean());
    diagonal.diagonal().setZero();
    EXPECT_LE(diagonal.cwiseAbs().maxCoeff(), 1e-4);
  }
}

TEST(CalibratorTest, OscarFileHasOneRotationPerLayer) {
  RandomSource source(2, 640);
  const auto file = Calibrate(source, DefaultCalibration(kernels::Method::kOscar), nullptr);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->method, "oscar");
  EXPECT_EQ(file->layers, 2);
  EXPECT_EQ(file->kv_heads, 1);
  EXPECT_EQ(file->tokens, 2 * 640);
  EXPECT_EQ(file->rotation_k.size(), 2u * 64 * 64);
  EXPECT_TRUE(file->mean_k.empty());
  EXPECT_TRUE(file->feedback_k.empty());
  EXPECT_TRUE(file->shift.empty());
  EXPECT_FLOAT_EQ(file->clip_k, 0.96f);
}

TEST(CalibratorTest, TooFewTokensAreRefused) {
  RandomSource source(1, 64 + 255);
  const absl::Status status = Calibrate(source, CrumbOptions(), nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("layer 0: only 255"));
}

TEST(CalibratorTest, ValuesThatAreNotFiniteAreNamed) {
  RandomSource source(3, 640);
  source.Poison();
  const absl::Status status = Calibrate(source, CrumbOptions(), nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("layer 0: q"));
}

// Returns the mean over windows of ||o' - o|| / ||o|| of one layer and KV head, in double
// precision: o is attention over the window's 64 rows for the four queries before its eviction, o'
// over its tile.
class ExpectedErrorOracle {
 public:
  ExpectedErrorOracle(const RotationFile& file, int layer, int head)
      : file_(file), at_(layer * 2 + head), head_(head) {}

  double MeanOver(ActivationSource& source, int layer) {
    double sum = 0.0;
    int windows = 0;
    EXPECT_TRUE(source
                    .ForEach(layer, 1,
                             [&](const SequenceActivations& s) {
                               for (int page = 0; 64 + page * 64 + 64 + 256 <= s.tokens; ++page) {
                                 sum += ErrorOf(s, page);
                                 ++windows;
                               }
                               return absl::OkStatus();
                             })
                    .ok());
    return sum / windows;
  }

 private:
  static constexpr int kDim = 64;
  using Rows = std::vector<std::vector<double>>;

  std::vector<float> RotatedMean(const float* mean, const std::vector<float>& rotation) const {
    std::vector<float> out(kDim);
    for (int c = 0; c < kDim; ++c) {
      double sum = 0.0;
      for (int i = 0; i < kDim; ++i) sum += double{mean[i]} * rotation[(at_ * kDim + i) * kDim + c];
      out[c] = static_cast<float>(sum);
    }
    return out;
  }

  static std::vector<double> Attend(const Bf16* q, const Rows& k, const Rows& v) {
    std::vector<double> out(kDim, 0.0), weights;
    double sum = 0.0;
    for (const auto& key : k) {
      double dot = 0.0;
      for (int c = 0; c < kDim; ++c) dot += kernels::Bf16ToFloat(q[c]) * key[c];
      weights.push_back(std::exp(dot / 8.0));
      sum += weights.back();
    }
    for (size_t t = 0; t < v.size(); ++t) {
      for (int c = 0; c < kDim; ++c) out[c] += weights[t] / sum * v[t][c];
    }
    return out;
  }

  double ErrorOf(const SequenceActivations& s, int page) {
    const int begin = 64 + page * 64;
    const int block = std::min(page / file_.pages_per_position_block, file_.position_blocks - 1);
    const std::vector<float> mean_k =
        RotatedMean(&file_.mean_k[(at_ * file_.position_blocks + block) * kDim], file_.rotation_k);
    const std::vector<float> mean_v = RotatedMean(&file_.mean_v[at_ * kDim], file_.rotation_v);
    kernels::QuantizeParams params;
    params.shape = {.tokens = 64, .head_dim = kDim, .group_size = 64};
    params.method = kernels::Method::kCrumb;
    params.k = s.k + (begin * 2 + head_) * kDim;
    params.v = s.v + (begin * 2 + head_) * kDim;
    params.k_stride = params.v_stride = 2 * kDim;
    params.k_transform = {&file_.rotation_k[at_ * kDim * kDim], mean_k.data(), file_.clip_k,
                          &file_.feedback_k[at_ * kDim * kDim], &file_.dual_k[at_ * kDim * kDim]};
    params.v_transform = {&file_.rotation_v[at_ * kDim * kDim], mean_v.data(), file_.clip_v,
                          nullptr};
    std::vector<uint8_t> tile(params.shape.int2_bytes() + 128);
    params.tile = tile.data() + (128 - reinterpret_cast<uintptr_t>(tile.data()) % 128) % 128;
    kernels::QuantizeTile(params);
    std::vector<float> tile_k(64 * kDim), tile_v(64 * kDim);
    kernels::DequantizeTileToModel(params.shape, params.tile, params.k_transform,
                                   params.v_transform, tile_k.data(), tile_v.data());
    Rows k(64), v(64), stored_k(64), stored_v(64);
    for (int t = 0; t < 64; ++t) {
      for (int c = 0; c < kDim; ++c) {
        k[t].push_back(kernels::Bf16ToFloat(params.k[t * 2 * kDim + c]));
        v[t].push_back(kernels::Bf16ToFloat(params.v[t * 2 * kDim + c]));
        stored_k[t].push_back(tile_k[t * kDim + c]);
        stored_v[t].push_back(tile_v[t * kDim + c]);
      }
    }
    double difference = 0.0, whole = 0.0;
    for (int t = begin + 64 + 256 - 4; t < begin + 64 + 256; ++t) {
      for (int query_head = 2 * head_; query_head < 2 * head_ + 2; ++query_head) {
        const Bf16* q = s.q + (t * 4 + query_head) * kDim;
        const std::vector<double> exact = Attend(q, k, v), got = Attend(q, stored_k, stored_v);
        for (int c = 0; c < kDim; ++c) {
          difference += (got[c] - exact[c]) * (got[c] - exact[c]);
          whole += exact[c] * exact[c];
        }
      }
    }
    return std::sqrt(difference / whole);
  }

  const RotationFile& file_;
  const size_t at_;
  const int head_;
};

TEST(CalibratorTest, TheExpectedAttentionErrorIsThatOfEvictedWindows) {
  RandomSource source(7, 640);  // 5 windows in each
  CalibrationOptions options = CrumbOptions();
  options.warn = [](const std::string& warning) { ADD_FAILURE() << warning; };
  const auto file = Calibrate(source, options, nullptr);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->attention_error.size(), 2u * 2);
  for (const int layer : {0, 1}) {
    for (const int head : {0, 1}) {
      const double expected = ExpectedErrorOracle(*file, layer, head).MeanOver(source, layer);
      EXPECT_GT(expected, 0.01);
      EXPECT_NEAR(file->attention_error[layer * 2 + head], expected, 1e-3 * expected);
    }
  }
}

// The method has one rotation for all KV heads, so the error is the mean over them. Six sequences
// have 30 windows, two fewer than are needed.
TEST(CalibratorTest, OscarExpectsOneErrorPerLayerAndFewWindowsNone) {
  RandomSource enough(7, 640), few(6, 640);
  CalibrationOptions options = DefaultCalibration(kernels::Method::kOscar);
  std::vector<std::string> warnings;
  options.warn = [&](const std::string& warning) { warnings.push_back(warning); };
  const auto file = Calibrate(enough, options, nullptr);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->attention_error.size(), 2u);
  EXPECT_TRUE(warnings.empty());
  EXPECT_TRUE(Calibrate(few, options, nullptr)->attention_error.empty());
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], testing::HasSubstr("only 30 windows to measure on, 32 are needed"));
}

TEST(CalibratorTest, HadamardNeedsAPowerOfTwo) {
  EXPECT_EQ(HadamardRotations(96).status().code(), absl::StatusCode::kInvalidArgument);
  const auto file = HadamardRotations(128);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->layers, 1);
  EXPECT_EQ(file->rotation_k.size(), 128u * 128);
}

}  // namespace
}  // namespace crumb::calibration
