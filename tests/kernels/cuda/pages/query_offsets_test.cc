// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/pages.h"

#include <algorithm>
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

TEST(QueryOffsets, HoldsTheQueriesOfOneHead) {
  CRUMB_NEEDS_DEVICE();
  constexpr int kSequences = 3, kTokens = 5, kHeads = 2, kQueryHeads = 6, kGroup = 3, kDim = 64;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<Bf16> q(kSequences * kTokens * kQueryHeads * kDim);
  for (Bf16& x : q) x = Bf16FromFloat(normal(random));
  const DeviceBuffer device_q(q), mean(std::vector<float>(kHeads * kDim, 1.0f));
  for (int sequence = -1; sequence < kSequences; ++sequence) {
    for (int head = 0; head < kHeads; ++head) {
      std::vector<int32_t> held_head(kSequences, 0);
      if (sequence >= 0) held_head[sequence] = head + 1;
      const DeviceBuffer device_held_head(held_head);
      const DeviceBuffer out(sizeof(float) * kSequences * kTokens * kQueryHeads);
      const DeviceBuffer held(sizeof(Bf16) * kTokens * kGroup * kDim);
      QueryOffsetsParams p;
      p.tokens = kSequences * kTokens;
      p.kv_heads = kHeads;
      p.q_heads = kQueryHeads;
      p.head_dim = kDim;
      p.q = device_q.as<Bf16>();
      p.mean_k = mean.as<float>();
      p.offset = out.as<float>();
      p.held_head = device_held_head.as<int32_t>();
      p.held_tokens = kTokens;
      p.held = held.as<Bf16>();
      ASSERT_CUDA(QueryOffsets(p, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());
      const std::vector<Bf16> got = held.Download<Bf16>();
      int differ = 0;
      for (int i = 0; i < kTokens * kGroup * kDim; ++i) {
        const int token = i / (kGroup * kDim), rest = i % (kGroup * kDim);
        const int from =
            ((std::max(sequence, 0) * kTokens + token) * kQueryHeads + head * kGroup) * kDim + rest;
        differ += got[i].bits != (sequence < 0 ? 0xffff : q[from].bits);
      }
      EXPECT_EQ(differ, 0) << sequence << " " << head;
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
