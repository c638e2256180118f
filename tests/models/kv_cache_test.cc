// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/kv_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/bf16.h"

namespace crumb::models {
namespace {

using kernels::Bf16;

ModelConfig SmallConfig(int q_heads, int kv_heads, int head_dim) {
  ModelConfig config;
  config.layers = 2;
  config.q_heads = q_heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  return config;
}

class DenseKvCacheTest : public testing::Test {
 protected:
  DenseKvCacheTest() : seed_(std::random_device{}()), random_(seed_) {}

  std::vector<Bf16> RandomRows(size_t count) {
    std::normal_distribution<float> normal(0.0f, 1.5f);
    std::vector<Bf16> rows(count);
    for (Bf16& value : rows) value = kernels::Bf16FromFloat(normal(random_));
    return rows;
  }

  const uint32_t seed_;
  std::mt19937 random_;
  ThreadPool pool_{2};
};

// Returns the attention of query row `token` of `total` by its definition in double precision.
std::vector<double> Definition(const ModelConfig& config, const std::vector<Bf16>& q,
                               const std::vector<Bf16>& k, const std::vector<Bf16>& v, int token,
                               int head) {
  const int d = config.head_dim;
  const int kv_head = head / (config.q_heads / config.kv_heads);
  const auto q_at = [&](int c) {
    return double{Bf16ToFloat(q[(token * config.q_heads + head) * d + c])};
  };
  std::vector<double> out(d, 0.0);
  double sum = 0.0;
  for (int t = 0; t <= token; ++t) {
    const size_t row = static_cast<size_t>(t * config.kv_heads + kv_head) * d;
    double score = 0.0;
    for (int c = 0; c < d; ++c) score += q_at(c) * Bf16ToFloat(k[row + c]);
    const double weight = std::exp(score / std::sqrt(double{1} * d));
    sum += weight;
    for (int c = 0; c < d; ++c) out[c] += weight * Bf16ToFloat(v[row + c]);
  }
  for (double& value : out) value /= sum;
  return out;
}

TEST_F(DenseKvCacheTest, AttentionIsTheDefinitionForAnyChunks) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  struct Shape {
    int q_heads, kv_heads, head_dim, tokens;
  };
  for (const Shape& s : {Shape{4, 2, 128, 75}, Shape{6, 1, 64, 40}, Shape{3, 3, 24, 50},
                         Shape{16, 2, 32, 20}, Shape{2, 1, 256, 300}}) {
    const ModelConfig config = SmallConfig(s.q_heads, s.kv_heads, s.head_dim);
    const int q_size = s.q_heads * s.head_dim;
    const int kv_size = s.kv_heads * s.head_dim;
    const std::vector<Bf16> q = RandomRows(size_t{1} * s.tokens * q_size);
    const std::vector<Bf16> k = RandomRows(size_t{1} * s.tokens * kv_size);
    const std::vector<Bf16> v = RandomRows(size_t{1} * s.tokens * kv_size);
    DenseKvCache cache(config, pool_);
    std::vector<float> out(q.size());
    for (int begin = 0; begin < s.tokens;) {
      const int count = std::min<int>(s.tokens - begin, 1 + random_() % 30);
      for (int layer = 0; layer < config.layers; ++layer) {
        ASSERT_TRUE(
            cache.Append(layer, count, k.data() + begin * kv_size, v.data() + begin * kv_size)
                .ok());
        ASSERT_TRUE(
            cache.Attend(layer, count, q.data() + begin * q_size, &out[begin * q_size]).ok());
      }
      ASSERT_TRUE(cache.Advance(std::vector<int32_t>(count)).ok());
      begin += count;
      ASSERT_EQ(cache.length(), begin);
    }
    for (int t = 0; t < s.tokens; ++t) {
      for (int h = 0; h < s.q_heads; ++h) {
        const std::vector<double> expected = Definition(config, q, k, v, t, h);
        for (int c = 0; c < s.head_dim; ++c) {
          ASSERT_NEAR(out[(t * s.q_heads + h) * s.head_dim + c], expected[c], 2e-5)
              << "token " << t << " head " << h << " of head_dim " << s.head_dim;
        }
      }
    }
  }
}

TEST_F(DenseKvCacheTest, LargeScoresDoNotOverflow) {
  const ModelConfig config = SmallConfig(1, 1, 32);
  DenseKvCache cache(config, pool_);
  const std::vector<Bf16> big(2 * 32, kernels::Bf16FromFloat(1e4f));
  std::vector<float> out(2 * 32);
  ASSERT_TRUE(cache.Append(0, 2, big.data(), big.data()).ok());
  ASSERT_TRUE(cache.Attend(0, 2, big.data(), out.data()).ok());
  for (const float value : out) EXPECT_EQ(value, kernels::Bf16ToFloat(big[0]));
}

TEST_F(DenseKvCacheTest, KeepsRowsByHead) {
  const ModelConfig config = SmallConfig(2, 2, 4);
  DenseKvCache cache(config, pool_);
  const std::vector<Bf16> k = RandomRows(3 * 2 * 4);
  const std::vector<Bf16> v = RandomRows(3 * 2 * 4);
  ASSERT_TRUE(cache.Append(1, 3, k.data(), v.data()).ok());
  ASSERT_EQ(cache.keys(1, 1).size(), 12u);
  EXPECT_TRUE(cache.keys(0, 1).empty());
  for (int t = 0; t < 3; ++t) {
    for (int c = 0; c < 4; ++c) {
      EXPECT_EQ(cache.keys(1, 1)[t * 4 + c].bits, k[(t * 2 + 1) * 4 + c].bits);
      EXPECT_EQ(cache.values(1, 0)[t * 4 + c].bits, v[t * 2 * 4 + c].bits);
    }
  }
}

TEST_F(DenseKvCacheTest, RefusesCallsOutOfOrder) {
  const ModelConfig config = SmallConfig(1, 1, 4);
  DenseKvCache cache(config, pool_);
  const std::vector<Bf16> rows = RandomRows(2 * 4);
  std::vector<float> out(2 * 4);
  EXPECT_EQ(cache.Append(2, 1, rows.data(), rows.data()).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.Append(0, 0, rows.data(), rows.data()).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.Attend(0, 1, rows.data(), out.data()).code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(cache.Append(0, 1, rows.data(), rows.data()).ok());
  EXPECT_EQ(cache.Attend(0, 2, rows.data(), out.data()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cache.Attend(-1, 1, rows.data(), out.data()).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.Advance(std::vector<int32_t>(1)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cache.length(), 0);
}

}  // namespace
}  // namespace crumb::models
