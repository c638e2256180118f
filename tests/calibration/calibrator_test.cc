// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/calibrator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "kernels/bf16.h"

namespace crumb::calibration {
namespace {

using kernels::Bf16;

// Two layers of random activations with means, in sequences of one length; keys do not turn.
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
  // Noise in keys makes logits of history heavier, never lighter.
  for (const float shift : file->shift) {
    EXPECT_GT(shift, 0.0f);
    EXPECT_LT(shift, 2.0f);
  }
  // diag(R' C R) is constant in what was stored.
  for (int head = 0; head < 4; ++head) {
    using RowMajor = Eigen::Matrix<float, 64, 64, Eigen::RowMajor>;
    const Eigen::MatrixXd r =
        Eigen::Map<const RowMajor>(&file->rotation_k[head * 64 * 64]).cast<double>();
    const Eigen::MatrixXd c =
        Eigen::Map<const RowMajor>(&file->covariance_k[head * 64 * 64]).cast<double>();
    const Eigen::VectorXd diagonal = (r.transpose() * c * r).diagonal();
    EXPECT_LE((diagonal.array() / diagonal.mean() - 1.0).abs().maxCoeff(), 1e-5);
  }
}

// Layer by layer or all at once, on one thread or several: the same file.
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
  options.value_hessians = [](int layer) -> absl::StatusOr<std::vector<Eigen::MatrixXd>> {
    Eigen::VectorXd steep(64);
    for (int i = 0; i < 64; ++i) steep[i] = std::pow(0.9, i) * (1 + layer);
    return std::vector<Eigen::MatrixXd>(2, Eigen::MatrixXd(steep.asDiagonal()));
  };
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

TEST(CalibratorTest, HadamardNeedsAPowerOfTwo) {
  EXPECT_EQ(HadamardRotations(96).status().code(), absl::StatusCode::kInvalidArgument);
  const auto file = HadamardRotations(128);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->layers, 1);
  EXPECT_EQ(file->rotation_k.size(), 128u * 128);
}

}  // namespace
}  // namespace crumb::calibration
