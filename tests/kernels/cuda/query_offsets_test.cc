// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/query_offsets.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/kernels/cuda/device_buffer.h"

namespace crumb::kernels::cuda {
namespace {

TEST(QueryOffsets, AgreeWithSumsInDoublePrecision) {
  CRUMB_NEEDS_DEVICE();
  for (const int dim : {64, 128, 256}) {
    for (const int blocks : {1, 3, 17}) {
      constexpr int kTokens = 7, kHeads = 2, kQueryHeads = 6;
      std::mt19937 random(dim + blocks);
      std::normal_distribution<float> normal;
      std::vector<Bf16> q(kTokens * kQueryHeads * dim);
      std::vector<float> mean(kHeads * dim * blocks);
      for (Bf16& x : q) x = Bf16FromFloat(normal(random));
      for (float& x : mean) x = normal(random);
      const DeviceBuffer device_q(q), device_mean(mean);
      DeviceBuffer out;
      out.Allocate(sizeof(float) * kTokens * kQueryHeads * blocks);
      QueryOffsetsParams p;
      p.tokens = kTokens;
      p.kv_heads = kHeads;
      p.q_heads = kQueryHeads;
      p.head_dim = dim;
      p.position_blocks = blocks;
      p.q = device_q.as<Bf16>();
      p.mean_k = device_mean.as<float>();
      p.offset = out.as<float>();
      ASSERT_CUDA(QueryOffsets(p, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());
      const std::vector<float> got = out.Download<float>();
      for (int row = 0; row < kTokens * kQueryHeads; ++row) {
        const int head = row % kQueryHeads / (kQueryHeads / kHeads);
        for (int block = 0; block < blocks; ++block) {
          double sum = 0.0;
          for (int i = 0; i < dim; ++i) {
            sum += double{Bf16ToFloat(q[row * dim + i])} * mean[(head * dim + i) * blocks + block];
          }
          EXPECT_NEAR(got[row * blocks + block], sum, 1e-4) << dim << " " << row << " " << block;
        }
      }
    }
  }
}

TEST(QueryOffsets, RefusesSizesItDoesNotServe) {
  QueryOffsetsParams p;
  p.q_heads = 3;
  p.kv_heads = 2;
  EXPECT_EQ(QueryOffsets(p, nullptr), cudaErrorInvalidValue);
  p.kv_heads = 3;
  p.tokens = 0;
  EXPECT_EQ(QueryOffsets(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::kernels::cuda
