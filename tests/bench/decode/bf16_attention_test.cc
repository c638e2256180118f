// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode/bf16_attention.h"

#include <cmath>
#include <random>
#include <vector>

#include "kernels/bf16.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::bench {
namespace {

using kernels::Bf16;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::HaveDevice;
using kernels::cuda::RandomRows;

constexpr int kDim = 128;

struct Case {
  int batch, tokens, kv_heads, group;
};

// Returns the softmax attention of one query row in double precision.
std::vector<double> Oracle(const Bf16* q, const Bf16* k, const Bf16* v, int tokens) {
  std::vector<double> logits(tokens), out(kDim, 0.0);
  double greatest = -INFINITY, sum = 0;
  for (int t = 0; t < tokens; ++t) {
    double dot = 0;
    for (int i = 0; i < kDim; ++i) {
      dot += double{kernels::Bf16ToFloat(q[i])} * kernels::Bf16ToFloat(k[size_t(t) * kDim + i]);
    }
    logits[t] = dot / std::sqrt(double{kDim});
    greatest = std::max(greatest, logits[t]);
  }
  for (int t = 0; t < tokens; ++t) {
    const double p = std::exp(logits[t] - greatest);
    sum += p;
    for (int i = 0; i < kDim; ++i) out[i] += p * kernels::Bf16ToFloat(v[size_t(t) * kDim + i]);
  }
  for (double& x : out) x /= sum;
  return out;
}

class Bf16AttentionTest : public testing::TestWithParam<Case> {};

TEST_P(Bf16AttentionTest, AgreesWithDoublePrecision) {
  CRUMB_NEEDS_DEVICE();
  const Case c = GetParam();
  const int q_heads = c.group * c.kv_heads;
  std::mt19937 random(c.tokens);
  const size_t head = size_t{2} * c.tokens * kDim;
  const std::vector<Bf16> q = RandomRows(size_t(c.batch) * q_heads * kDim, 2.0, random);
  const std::vector<Bf16> rows = RandomRows(c.batch * c.kv_heads * head, 1.0, random);
  DeviceBuffer device_q(q), device_rows(rows), out(q.size() * sizeof(Bf16));
  std::vector<uint64_t> address;
  for (int s = 0; s < c.batch; ++s) {
    address.push_back(device_rows.address() + s * c.kv_heads * head * sizeof(Bf16));
  }
  DeviceBuffer device_address(address);
  DeviceBuffer workspace(Bf16AttentionWorkspaceBytes(c.batch, c.kv_heads));
  Bf16AttentionParams p;
  p.batch = c.batch;
  p.tokens = c.tokens;
  p.kv_heads = c.kv_heads;
  p.q_heads = q_heads;
  p.q = device_q.as<Bf16>();
  p.out = out.as<Bf16>();
  p.rows = {device_address.as<uint64_t>(), 0, static_cast<int64_t>(2 * head), 2 * kDim,
            static_cast<int64_t>(head)};
  p.workspace = workspace.as<void>();
  for (int repeat = 0; repeat < 2; ++repeat) {
    out.Fill(0xff);
    ASSERT_CUDA(Bf16Attention(p, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<Bf16> found = out.Download<Bf16>();
    double worst = 0;
    for (int s = 0; s < c.batch; ++s) {
      for (int h = 0; h < q_heads; ++h) {
        const size_t at = (size_t(s) * q_heads + h) * kDim;
        const Bf16* k = rows.data() + (size_t(s) * c.kv_heads + h / c.group) * head;
        const auto expected = Oracle(q.data() + at, k, k + head / 2, c.tokens);
        double error = 0, norm = 0;
        for (int i = 0; i < kDim; ++i) {
          const double difference = kernels::Bf16ToFloat(found[at + i]) - expected[i];
          error += difference * difference;
          norm += expected[i] * expected[i];
        }
        const double relative = std::sqrt(error / norm);
        worst = std::isnan(relative) ? INFINITY : std::max(worst, relative);
      }
    }
    EXPECT_LT(worst, 6e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Bf16AttentionTest,
                         testing::Values(Case{1, 1, 1, 1}, Case{1, 16, 8, 4}, Case{2, 17, 3, 5},
                                         Case{1, 4099, 8, 4}, Case{3, 1000, 2, 8},
                                         Case{1, 3001, 1, 12}, Case{70, 130, 2, 16},
                                         Case{5, 2048, 8, 1}));

TEST(Bf16AttentionTest, RefusesSizesItDoesNotServe) {
  Bf16AttentionParams p;
  p.rows.token_stride = 2 * kDim;
  p.head_dim = 64;
  EXPECT_EQ(Bf16Attention(p, nullptr), cudaErrorInvalidValue);
  p.head_dim = kDim;
  p.q_heads = 17;
  EXPECT_EQ(Bf16Attention(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::bench
