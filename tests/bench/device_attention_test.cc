// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares the quality bench's device attention with that of the CPU on the same pages. Needs a
// GPU.
#include "bench/quality_cuda/device_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/quantize.h"

namespace crumb::bench {
namespace {

constexpr int kDim = 128, kKvHeads = 2, kQHeads = 4, kTokens = 64, kCapacity = 1024, kBlocks = 3;

struct Case {
  int pages = 0;
  int sink_tokens = 0;
  int recent_tokens = 0;
  int q_tokens = 1;
  bool constants = false;  // rotations, means, offsets and shifts
};

class DeviceAttentionTest : public testing::TestWithParam<Case> {
 protected:
  std::vector<kernels::Bf16> Rows(size_t count) {
    std::vector<kernels::Bf16> rows(count);
    for (kernels::Bf16& x : rows) x = kernels::Bf16FromFloat(normal_(random_));
    return rows;
  }
  std::vector<float> Floats(size_t count, float scale) {
    std::vector<float> values(count);
    for (float& x : values) x = scale * normal_(random_);
    return values;
  }

  std::mt19937 random_{11};
  std::normal_distribution<float> normal_;
};

TEST_P(DeviceAttentionTest, AgreesWithTheCpu) {
  const Case& c = GetParam();
  const auto backend = OpenDeviceAttention();
  if (absl::IsFailedPrecondition(backend.status()))
    GTEST_SKIP() << "needs a CUDA device: " << backend.status();
  ASSERT_TRUE(backend.ok()) << backend.status();
  kernels::AttentionParams params;
  params.shape = {.tokens = kTokens, .head_dim = kDim, .group_size = kDim};
  params.q_tokens = c.q_tokens;
  params.kv_heads = kKvHeads;
  params.q_heads = kQHeads;
  const auto q = Rows(size_t{1} * c.q_tokens * kQHeads * kDim);
  const auto k = Rows(size_t{1} * kKvHeads * kCapacity * kDim);
  const auto v = Rows(k.size());
  params.q = q.data();
  params.sink_k = params.recent_k = k.data();
  params.sink_v = params.recent_v = v.data();
  params.sink_head_stride = params.recent_head_stride = kCapacity * kDim;
  params.sink_token_stride = params.recent_token_stride = kDim;
  params.sink_tokens = c.sink_tokens;
  params.recent_begin = c.sink_tokens;
  params.recent_tokens = c.recent_tokens;
  params.recent_capacity = kCapacity;

  const size_t tile = params.shape.int2_bytes();
  std::vector<uint8_t> storage(tile * kKvHeads * (c.pages + 1) + 128);
  auto* tiles =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(storage.data()) + 127) / 128 * 128);
  const auto history_k = Rows(size_t{1} * (c.pages + 1) * kTokens * kDim);
  const auto history_v = Rows(history_k.size());
  std::vector<uint64_t> addresses;
  for (int page = 0; page < c.pages; ++page) {
    addresses.push_back(reinterpret_cast<uint64_t>(tiles + page * kKvHeads * tile));
    for (int head = 0; head < kKvHeads; ++head) {
      kernels::QuantizeParams quantize;
      quantize.shape = params.shape;
      quantize.k = &history_k[size_t{1} * page * kTokens * kDim];
      quantize.v = &history_v[size_t{1} * page * kTokens * kDim];
      quantize.k_stride = quantize.v_stride = kDim;
      quantize.tile = tiles + (page * kKvHeads + head) * tile;
      kernels::QuantizeTile(quantize);
    }
  }
  params.pages = c.pages;
  params.page_address = addresses.data();
  params.page_head_stride = static_cast<int64_t>(tile);
  const auto rotation_k = Floats(kKvHeads * kDim * kDim, 0.09f);
  const auto rotation_v = Floats(kKvHeads * kDim * kDim, 0.09f);
  const auto mean_v = Floats(kKvHeads * kDim, 0.5f);
  const auto offset = Floats(size_t{1} * c.q_tokens * kQHeads * kBlocks, 1.0f);
  const auto shift = Floats(kQHeads, 0.2f);
  if (c.constants) {
    params.rotation_k = rotation_k.data();
    params.rotation_v = rotation_v.data();
    params.mean_v = mean_v.data();
    params.offset = offset.data();
    params.position_blocks = kBlocks;
    params.pages_per_position_block = 2;
    params.shift = shift.data();
  }

  std::vector<float> expected(q.size()), found(q.size());
  params.out = expected.data();
  ASSERT_TRUE(AttendOnCpu(params).ok());
  params.out = found.data();
  ASSERT_TRUE((*backend)(params).ok());
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(expected[i] - found[i], 2);
    norm += std::pow(expected[i], 2);
  }
  EXPECT_LT(std::sqrt(error / norm), 5e-3);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, DeviceAttentionTest,
    testing::Values(Case{.pages = 0, .sink_tokens = 0, .recent_tokens = 64, .q_tokens = 64},
                    Case{.pages = 0, .sink_tokens = 0, .recent_tokens = 1000, .q_tokens = 13},
                    Case{.pages = 1, .sink_tokens = 64, .recent_tokens = 320, .q_tokens = 64},
                    Case{.pages = 9, .sink_tokens = 64, .recent_tokens = 257, .q_tokens = 1},
                    Case{.pages = 9,
                         .sink_tokens = 64,
                         .recent_tokens = 320,
                         .q_tokens = 64,
                         .constants = true}));

}  // namespace
}  // namespace crumb::bench
