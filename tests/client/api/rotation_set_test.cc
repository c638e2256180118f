// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/rotation_set.h"

#include <cmath>
#include <limits>

#include "common/rotation_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::client {
namespace {

RotationSet::Arrays Identities(int layers, int heads, int dim) {
  RotationSet::Arrays arrays;
  arrays.layers = layers;
  arrays.kv_heads = heads;
  arrays.head_dim = dim;
  arrays.rotation_k.assign(size_t(layers) * heads * dim * dim, 0.0f);
  for (int m = 0; m < layers * heads; ++m) {
    for (int i = 0; i < dim; ++i) arrays.rotation_k[(size_t(m) * dim + i) * dim + i] = 1.0f;
  }
  return arrays;
}

TEST(RotationSetTest, HadamardIsOrthogonalSymmetricAndTheSameEverywhere) {
  const RotationSet set = RotationSet::Hadamard(64).value();
  const auto layers = set.Expand(3, 2);
  ASSERT_EQ(layers.size(), 3);
  EXPECT_EQ(layers[0], layers[2]);
  const float* r = layers[0]->rotation_k();
  EXPECT_FLOAT_EQ(r[0], 0.125f);
  EXPECT_FLOAT_EQ(r[1 * 64 + 1], -0.125f);
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) {
      EXPECT_EQ(r[i * 64 + j], r[j * 64 + i]);
      EXPECT_EQ(r[i * 64 + j], r[64 * 64 + i * 64 + j]);  // the second head has the same R
      double dot = 0.0;
      for (int c = 0; c < 64; ++c) dot += double(r[i * 64 + c]) * r[j * 64 + c];
      EXPECT_NEAR(dot, i == j ? 1.0 : 0.0, 1e-6);
    }
  }
  EXPECT_EQ(RotationSet::Hadamard(96).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RotationSet::Hadamard(0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RotationSetTest, DigestCoversNameShapeAndValues) {
  RotationSet::Arrays arrays = Identities(1, 1, 64);
  const Digest plain = RotationSet::Of("a", arrays)->digest();
  EXPECT_EQ(RotationSet::Of("a", arrays)->digest(), plain);
  EXPECT_NE(RotationSet::Of("b", arrays)->digest(), plain);
  arrays.rotation_k[0] = -1.0f;
  EXPECT_NE(RotationSet::Of("a", arrays)->digest(), plain);
  arrays = Identities(1, 1, 64);
  arrays.rotation_v = arrays.rotation_k;
  EXPECT_NE(RotationSet::Of("a", arrays)->digest(), plain);
  EXPECT_NE(RotationSet::Identity().digest(), RotationSet::Hadamard(64)->digest());
}

TEST(RotationSetTest, RefusesWhatIsNoRotation) {
  const auto code = [](RotationSet::Arrays arrays) {
    return RotationSet::Of("x", std::move(arrays)).status().code();
  };
  RotationSet::Arrays arrays = Identities(2, 1, 64);
  EXPECT_EQ(code(arrays), absl::StatusCode::kOk);
  arrays.rotation_k[64 * 64 + 5] = 0.1f;
  EXPECT_EQ(code(arrays), absl::StatusCode::kInvalidArgument);
  arrays = Identities(2, 1, 64);
  arrays.rotation_k.pop_back();
  EXPECT_EQ(code(arrays), absl::StatusCode::kInvalidArgument);
  arrays = Identities(1, 1, 64);
  arrays.mean_k.assign(64, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(code(arrays), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({}), absl::StatusCode::kInvalidArgument);
}

// R = [2 1; 0 1] and its dual Q = [1/2 0; -1/2 1], with R Q' = I.
RotationSet::Arrays WithDual() {
  RotationSet::Arrays arrays;
  arrays.head_dim = 2;
  arrays.rotation_k = {2.0f, 1.0f, 0.0f, 1.0f};
  arrays.dual_k = {0.5f, 0.0f, -0.5f, 1.0f};
  return arrays;
}

TEST(RotationSetTest, ADualStandsForTheInverse) {
  RotationSet::Arrays arrays = WithDual();
  arrays.mean_k = {3.0f, 5.0f};
  const auto set = RotationSet::Of("a", arrays);
  ASSERT_TRUE(set.ok()) << set.status();
  const auto layer = set->Expand(1, 2)[0];
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(layer->rotation_k()[i], arrays.rotation_k[i % 4]);
    EXPECT_EQ(layer->dual_k()[i], arrays.dual_k[i % 4]);
  }
  EXPECT_EQ(layer->rotated_mean_k()[0], 6.0f);  // mu R, not mu Q
  EXPECT_EQ(layer->rotated_mean_k()[1], 8.0f);
  EXPECT_EQ(layer->dual_v(), nullptr);
  // Without a dual the rotation is its own.
  const auto plain = RotationSet::Hadamard(64)->Expand(1, 1)[0];
  EXPECT_EQ(plain->dual_k(), plain->rotation_k());
  EXPECT_EQ(plain->dual_v(), plain->rotation_v());
}

TEST(RotationSetTest, DigestCoversDuals) {
  RotationSet::Arrays arrays = WithDual();
  arrays.rotation_v = arrays.rotation_k;
  arrays.dual_v = arrays.dual_k;
  const Digest digest = RotationSet::Of("a", arrays)->digest();
  arrays.dual_k[0] += 1e-4f;  // still the inverse, to within the tolerance
  ASSERT_TRUE(RotationSet::Of("a", arrays).ok());
  EXPECT_NE(RotationSet::Of("a", arrays)->digest(), digest);
  arrays = WithDual();
  const Digest keys = RotationSet::Of("a", arrays)->digest();
  std::swap(arrays.rotation_k, arrays.rotation_v);
  std::swap(arrays.dual_k, arrays.dual_v);
  EXPECT_NE(RotationSet::Of("a", arrays)->digest(), keys);
}

TEST(RotationSetTest, RefusesADualThatIsNoInverse) {
  const auto message = [](RotationSet::Arrays arrays) {
    const absl::Status status = RotationSet::Of("x", std::move(arrays)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  RotationSet::Arrays arrays = WithDual();
  arrays.dual_k[2] = 0.5f;
  EXPECT_EQ(message(arrays), "dual_k is not the inverse of rotation_k at rows 0, 1");
  arrays = WithDual();
  arrays.dual_k.clear();
  EXPECT_EQ(message(arrays), "rotation_k is not orthogonal at rows 0, 0");
  arrays = WithDual();
  arrays.rotation_k.clear();
  EXPECT_EQ(message(arrays), "dual_k without rotation_k");
  arrays = WithDual();
  arrays.dual_k.pop_back();
  EXPECT_EQ(message(arrays), "dual_k has 3 values, its shape needs 4");
}

// A metric with weights of both signs, or with some weights missing, has no Cholesky factor, and
// rows that are rounded in it are wrong.
TEST(RotationSetTest, RefusesFeedbackWhoseWeightsAreNoMetric) {
  const auto status = [](const std::vector<float>& feedback, bool of_keys) {
    RotationSet::Arrays arrays;
    arrays.layers = 2;
    arrays.head_dim = 2;
    (of_keys ? arrays.feedback_k : arrays.feedback_v) = feedback;
    return RotationSet::Of("x", std::move(arrays)).status();
  };
  // Each matrix may have weights or none.
  EXPECT_TRUE(status({0.0f, 0.5f, 0.0f, 0.0f, 1e-30f, -0.5f, 0.0f, 2.0f}, true).ok());
  const std::vector<float> one_is_zero = {0.0f, 0.5f, 0.0f, 0.0f, 1.0f, 0.5f, 0.0f, 0.0f};
  const std::vector<float> one_is_negative = {1.0f, 0.5f, 0.0f, -2.0f, 0.0f, 0.5f, 0.0f, 0.0f};
  for (const bool of_keys : {true, false}) {
    const std::string name = of_keys ? "feedback_k" : "feedback_v";
    absl::Status refused = status(one_is_zero, of_keys);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(refused.message(),
              name +
                  ", matrix 1, has 1 weights above 0 and 1 zeros on its diagonal of 2; all must "
                  "be above 0, or all 0. Calibrate again");
    refused = status(one_is_negative, of_keys);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(refused.message(),
              name +
                  ", matrix 0, has 1 weights above 0 and 0 zeros on its diagonal of 2; all must "
                  "be above 0, or all 0. Calibrate again");
  }
}

TEST(RotationSetTest, TheExpectedAttentionErrorIsOfTheRequestedTiles) {
  RotationSet::Arrays arrays = Identities(2, 2, 64);
  const TileRange all{{0, 2}, {0, 2}};
  EXPECT_FALSE(RotationSet::Of("a", arrays)->ExpectedAttentionError(all).has_value());
  arrays.attention_error = {0.1f, 0.2f, 0.3f, 0.4f};
  const RotationSet set = RotationSet::Of("a", arrays).value();
  EXPECT_NEAR(*set.ExpectedAttentionError(all), 0.25, 1e-6);
  EXPECT_NEAR(*set.ExpectedAttentionError({{1, 2}, {0, 2}}), 0.35, 1e-6);
  EXPECT_NEAR(*set.ExpectedAttentionError({{0, 2}, {1, 2}}), 0.3, 1e-6);
  arrays.attention_error.pop_back();
  EXPECT_EQ(RotationSet::Of("a", arrays).status().code(), absl::StatusCode::kInvalidArgument);

  // One array for all layers and heads.
  arrays = Identities(1, 1, 64);
  arrays.attention_error = {0.4f};
  EXPECT_NEAR(*RotationSet::Of("a", arrays)->ExpectedAttentionError({{0, 36}, {2, 8}}), 0.4, 1e-6);
}

TEST(RotationSetTest, FitsModelsOfItsShape) {
  const RotationSet set = RotationSet::Of("x", Identities(2, 1, 64)).value();
  EXPECT_TRUE(set.CheckFits(2, 8, 8, 64).ok());
  EXPECT_FALSE(set.CheckFits(3, 8, 8, 64).ok());
  EXPECT_FALSE(set.CheckFits(2, 8, 8, 128).ok());
  EXPECT_TRUE(RotationSet::Identity().CheckFits(5, 5, 5, 256).ok());
}

TEST(RotationSetTest, AFileOfAnotherGeometryIsNamedWithBothGeometries) {
  RotationFile file;
  file.method = "oscar";
  file.model = "big";
  file.layers = 2;
  file.kv_heads = 1;
  file.head_dim = 64;
  const RotationSet::Arrays arrays = Identities(2, 1, 64);
  file.rotation_k = arrays.rotation_k;
  file.rotation_v = arrays.rotation_v;
  const auto set = RotationSet::FromFile(file, "dir/big.rotation");
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->CheckFits(3, 8, 16, 128).message(),
            "rotations 'dir/big.rotation, oscar for big' are for 2 layers, any number of KV heads, "
            "head_dim 64; the model has layers 3, KV heads 8, query heads 16, head_dim 128");
}

TEST(RotationSetTest, AFileThatIsRefusedIsNamed) {
  RotationFile file;
  file.method = "crumb";
  file.layers = 1;
  file.kv_heads = 1;
  file.head_dim = 2;
  file.feedback_k = {1.0f, 0.5f, 0.0f, 0.0f};
  const absl::Status status = RotationSet::FromFile(file, "dir/wrong.rotation").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              testing::StartsWith("dir/wrong.rotation: feedback_k, matrix 0, has"));
}

TEST(RotationSetTest, MeansAreRotated) {
  RotationSet::Arrays arrays = Identities(1, 1, 2);
  const float s = std::sqrt(0.5f);
  arrays.rotation_k = {s, -s, s, s};
  arrays.mean_k = {1.0f, 3.0f};
  arrays.mean_v = {5.0f, 6.0f};
  const auto layers = RotationSet::Of("x", arrays)->Expand(1, 2);
  EXPECT_NEAR(layers[0]->rotated_mean_k()[0], 4.0f * s, 1e-6);
  EXPECT_NEAR(layers[0]->rotated_mean_k()[3], 2.0f * s, 1e-6);
  EXPECT_EQ(layers[0]->rotated_mean_v()[1], 6.0f);  // V has no rotation
}

}  // namespace
}  // namespace crumb::client
