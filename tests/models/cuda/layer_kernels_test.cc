// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/layer_kernels.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/bf16.h"
#include "models/cuda/projections.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/random_inputs.h"
#include "tests/models/cuda/rows.h"

namespace crumb::models::cuda {
namespace {

using kernels::Bf16;
using kernels::Bf16FromFloat;
using kernels::Bf16ToFloat;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::HaveDevice;
using kernels::cuda::RandomRows;

constexpr int kDim = 128;

class NormTest : public testing::TestWithParam<int> {};

TEST_P(NormTest, AddsUpdatesAndNormalizes) {
  CRUMB_NEEDS_DEVICE();
  const int hidden = GetParam(), rows = 3;
  std::mt19937 random(hidden);
  std::vector<Bf16> residual = RandomRows(size_t(rows) * hidden, 2.0, random);
  const std::vector<Bf16> update = RandomRows(size_t(rows) * hidden, 1.0, random);
  const std::vector<Bf16> weight = RandomRows(hidden, 1.0, random);
  DeviceBuffer device_residual(residual), device_update(update), device_weight(weight);
  DeviceBuffer out(residual.size() * sizeof(Bf16));
  ASSERT_CUDA(AddAndNorm({rows, hidden, 1e-6f}, device_update.as<Bf16>(), device_weight.as<Bf16>(),
                         device_residual.as<Bf16>(), out.as<Bf16>(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::vector<double> expected;
  for (size_t i = 0; i < residual.size(); ++i) {
    residual[i] = Bf16FromFloat(Bf16ToFloat(residual[i]) + Bf16ToFloat(update[i]));
  }
  for (int r = 0; r < rows; ++r) {
    const auto row = Normalized(residual.data() + size_t(r) * hidden, weight.data(), hidden, 1e-6);
    expected.insert(expected.end(), row.begin(), row.end());
  }
  ExpectClose(out.Download<Bf16>(), expected, 1e-6);
  const std::vector<Bf16> kept = device_residual.Download<Bf16>();
  EXPECT_TRUE(std::equal(kept.begin(), kept.end(), residual.begin(),
                         [](Bf16 a, Bf16 b) { return a.bits == b.bits; }));
}

TEST_P(NormTest, BeginsAsEmbeddings) {
  CRUMB_NEEDS_DEVICE();
  const int hidden = GetParam(), vocabulary = 11;
  std::mt19937 random(hidden + 1);
  const std::vector<Bf16> table = RandomRows(size_t(vocabulary) * hidden, 1.0, random);
  const std::vector<Bf16> weight = RandomRows(hidden, 1.0, random);
  const std::vector<int32_t> tokens = {10, 0, 7, 7};
  DeviceBuffer device_table(table), device_weight(weight), device_tokens(tokens);
  DeviceBuffer residual(tokens.size() * hidden * sizeof(Bf16)), out(residual.bytes());
  ASSERT_CUDA(EmbedAndNorm({4, hidden, 1e-6f}, device_tokens.as<int32_t>(), device_table.as<Bf16>(),
                           device_weight.as<Bf16>(), residual.as<Bf16>(), out.as<Bf16>(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::vector<double> rows, normalized;
  for (const int32_t token : tokens) {
    const Bf16* row = table.data() + size_t(token) * hidden;
    for (int i = 0; i < hidden; ++i) rows.push_back(Value(row[i]));
    const auto norm = Normalized(row, weight.data(), hidden, 1e-6);
    normalized.insert(normalized.end(), norm.begin(), norm.end());
  }
  ExpectClose(residual.Download<Bf16>(), rows, 0);
  ExpectClose(out.Download<Bf16>(), normalized, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Widths, NormTest, testing::Values(8, 256, 264, 2560, 8192));

struct RopeCase {
  int q_heads, kv_heads, rotary_dim;
  bool norm, ring;
};

class RopeTest : public testing::TestWithParam<RopeCase> {
 protected:
  static constexpr int kRows = 3;
  static constexpr int kCapacity = 5;

  std::vector<double> Turned(const Bf16* head, const std::vector<Bf16>& weight, int row) const {
    const RopeCase& c = GetParam();
    std::vector<double> x;
    if (c.norm) {
      x = Normalized(head, weight.data(), kDim, 1e-6);
    } else {
      for (int i = 0; i < kDim; ++i) x.push_back(Value(head[i]));
    }
    const int half = c.rotary_dim / 2;
    for (int i = 0; i < half; ++i) {
      const double cosine = cosine_[row * half + i], sine = sine_[row * half + i];
      const double low = x[i], high = x[i + half];
      x[i] = low * cosine - high * sine;
      x[i + half] = high * cosine + low * sine;
    }
    return x;
  }

  std::vector<float> cosine_, sine_;
};

TEST_P(RopeTest, AgreesWithDoublePrecision) {
  CRUMB_NEEDS_DEVICE();
  const RopeCase c = GetParam();
  const int heads = c.q_heads + 2 * c.kv_heads;
  std::mt19937 random(c.q_heads + c.rotary_dim);
  const std::vector<Bf16> qkv = RandomRows(size_t(kRows) * heads * kDim, 1.5, random);
  const std::vector<Bf16> q_weight = RandomRows(kDim, 1.0, random);
  const std::vector<Bf16> k_weight = RandomRows(kDim, 1.0, random);
  std::normal_distribution<float> normal;
  std::vector<float> mean(size_t(c.kv_heads) * kDim);
  for (float& x : mean) x = normal(random);
  for (int i = 0; i < kRows * c.rotary_dim / 2; ++i) {
    const double angle = 3.0 * normal(random);
    cosine_.push_back(static_cast<float>(std::cos(angle)));
    sine_.push_back(static_cast<float>(std::sin(angle)));
  }
  DeviceBuffer device_qkv(qkv), device_qw(q_weight), device_kw(k_weight), device_mean(mean);
  DeviceBuffer cosine(cosine_), sine(sine_);
  const size_t kv_rows = size_t(kRows) * c.kv_heads * kDim;
  DeviceBuffer q(size_t(kRows) * c.q_heads * kDim * 2), k(kv_rows * 2), v(kv_rows * 2);
  DeviceBuffer offset(size_t(kRows) * c.q_heads * 4);
  DeviceBuffer ring(kv_rows * 2 * 2 * kCapacity);
  const std::vector<int32_t> begin_host = {0, 3, 4}, tokens_host = {1, 5, 3};
  std::vector<uint64_t> address;
  for (int r = 0; r < kRows; ++r) {
    address.push_back(ring.address() + r * ring.bytes() / kRows);
  }
  DeviceBuffer begin(begin_host), tokens(tokens_host), device_address(address);
  RopeParams p;
  p.rows = kRows;
  p.q_heads = c.q_heads;
  p.kv_heads = c.kv_heads;
  p.rotary_dim = c.rotary_dim;
  p.qkv = device_qkv.as<Bf16>();
  p.q_weight = c.norm ? device_qw.as<Bf16>() : nullptr;
  p.k_weight = c.norm ? device_kw.as<Bf16>() : nullptr;
  p.cosine = cosine.as<float>();
  p.sine = sine.as<float>();
  p.q = q.as<Bf16>();
  if (c.ring) {
    p.ring = {device_address.as<uint64_t>(), 0, 2 * kCapacity * 2 * kDim, 2 * kDim,
              kCapacity * 2 * kDim};
    p.begin = begin.as<int32_t>();
    p.tokens = tokens.as<int32_t>();
    p.capacity = kCapacity;
    p.mean_k = device_mean.as<float>();
    p.offset = offset.as<float>();
  } else {
    p.k = k.as<Bf16>();
    p.v = v.as<Bf16>();
  }
  ASSERT_CUDA(NormRopeAppend(p, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());

  const std::vector<Bf16> found_q = q.Download<Bf16>();
  const std::vector<float> found_offset = offset.Download<float>();
  const std::vector<Bf16> found_ring = ring.Download<Bf16>();
  std::vector<Bf16> found_k = k.Download<Bf16>(), found_v = v.Download<Bf16>();
  std::vector<double> expected_q, expected_k, expected_v;
  for (int r = 0; r < kRows; ++r) {
    const Bf16* row = qkv.data() + size_t(r) * heads * kDim;
    for (int h = 0; h < c.q_heads; ++h) {
      const auto head = Turned(row + h * kDim, q_weight, r);
      expected_q.insert(expected_q.end(), head.begin(), head.end());
    }
    for (int h = 0; h < c.kv_heads; ++h) {
      const auto head = Turned(row + (c.q_heads + h) * kDim, k_weight, r);
      expected_k.insert(expected_k.end(), head.begin(), head.end());
      for (int i = 0; i < kDim; ++i) {
        expected_v.push_back(Value(row[(c.q_heads + c.kv_heads + h) * kDim + i]));
      }
      if (!c.ring) continue;
      const int slot = (begin_host[r] + tokens_host[r] - 1) % kCapacity;
      const size_t head_at = (size_t(r) * c.kv_heads + h) * 2 * kCapacity * kDim;
      const size_t to = (size_t(r) * c.kv_heads + h) * kDim;
      std::copy_n(found_ring.begin() + head_at + slot * kDim, kDim, found_k.begin() + to);
      std::copy_n(found_ring.begin() + head_at + (kCapacity + slot) * kDim, kDim,
                  found_v.begin() + to);
    }
  }
  ExpectClose(found_q, expected_q, 1e-5);
  ExpectClose(found_k, expected_k, 1e-5);
  ExpectClose(found_v, expected_v, 0);
  if (!c.ring) return;
  const auto written = static_cast<size_t>(
      std::count_if(found_ring.begin(), found_ring.end(), [](Bf16 x) { return x.bits != 0xffff; }));
  EXPECT_EQ(written, 2 * kv_rows);
  for (size_t i = 0; i < found_offset.size(); ++i) {
    double dot = 0;
    const size_t kv_head = i % c.q_heads / (c.q_heads / c.kv_heads);
    for (int j = 0; j < kDim; ++j) dot += Value(found_q[i * kDim + j]) * mean[kv_head * kDim + j];
    EXPECT_NEAR(found_offset[i], dot, 1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RopeTest,
                         testing::Values(RopeCase{32, 8, 128, true, true},
                                         RopeCase{4, 2, 128, true, false},
                                         RopeCase{12, 1, 64, true, true},
                                         RopeCase{3, 3, 64, false, true}));

TEST(GateUpTest, AgreesWithDoublePrecision) {
  CRUMB_NEEDS_DEVICE();
  constexpr int kRows = 3, kWidth = 9728;
  std::mt19937 random(5);
  const std::vector<Bf16> in = RandomRows(size_t(kRows) * 2 * kWidth, 3.0, random);
  DeviceBuffer device_in(in), out(size_t(kRows) * kWidth * 2);
  ASSERT_CUDA(GateUp(kRows, kWidth, device_in.as<Bf16>(), out.as<Bf16>(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::vector<double> expected;
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) {
      const double gate = Value(in[size_t(r) * 2 * kWidth + i]);
      expected.push_back(gate / (1 + std::exp(-gate)) *
                         Value(in[(size_t(r) * 2 + 1) * kWidth + i]));
    }
  }
  ExpectClose(out.Download<Bf16>(), expected, 1e-6);
}

TEST(GreedyTokensTest, TakesTheLowestOfTheGreatest) {
  CRUMB_NEEDS_DEVICE();
  constexpr int kVocabulary = 151936;
  std::mt19937 random(6);
  std::vector<Bf16> logits = RandomRows(size_t{4} * kVocabulary, 1.0, random);
  const std::vector<int32_t> expected = {0, 151935, 70000, 9};
  for (int r = 0; r < 3; ++r) logits[size_t(r) * kVocabulary + expected[r]] = Bf16FromFloat(9.0f);
  logits[size_t{2} * kVocabulary + 70001] = Bf16FromFloat(9.0f);
  for (int i = 0; i < kVocabulary; ++i) {
    logits[size_t{3} * kVocabulary + i] = Bf16FromFloat(i == 9 ? -1.0f : -2.0f);
  }
  DeviceBuffer device(logits), best(std::vector<uint64_t>(4, 0)), done(std::vector<uint32_t>(4, 0));
  for (int repeat = 0; repeat < 2; ++repeat) {
    DeviceBuffer tokens(4 * sizeof(int32_t));
    ASSERT_CUDA(GreedyTokens(4, kVocabulary, device.as<Bf16>(), best.as<uint64_t>(),
                             done.as<uint32_t>(), tokens.as<int32_t>(), nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(tokens.Download<int32_t>(), expected);
  }
}

TEST(LayerKernelsTest, RefuseSizesTheyDoNotServe) {
  EXPECT_EQ(AddAndNorm({1, 12, 1e-6f}, nullptr, nullptr, nullptr, nullptr, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(AddAndNorm({1, 8200, 1e-6f}, nullptr, nullptr, nullptr, nullptr, nullptr),
            cudaErrorInvalidValue);
  RopeParams rope;
  rope.head_dim = 64;
  EXPECT_EQ(NormRopeAppend(rope, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(GateUp(1, 12, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(GreedyTokens(0, 8, nullptr, nullptr, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
}

TEST(ProjectionsTest, AgreeWithDoublePrecisionTunedOrNot) {
  CRUMB_NEEDS_DEVICE();
  std::string error;
  const auto projections = Projections::Open(&error);
  ASSERT_NE(projections, nullptr) << error;
  for (const int rows : {1, 2, 3, 4, 5, 32}) {
    const ProjectionShape shape = {rows, 264, 72};
    std::mt19937 random(rows);
    const std::vector<Bf16> x = RandomRows(size_t(rows) * shape.inputs, 1.0, random);
    const std::vector<Bf16> w = RandomRows(size_t(shape.outputs) * shape.inputs, 1.0, random);
    std::vector<double> expected;
    for (int r = 0; r < rows; ++r) {
      for (int o = 0; o < shape.outputs; ++o) {
        double sum = 0;
        for (int i = 0; i < shape.inputs; ++i) {
          sum += Value(x[size_t(r) * shape.inputs + i]) * Value(w[size_t(o) * shape.inputs + i]);
        }
        expected.push_back(0.25 * sum);
      }
    }
    DeviceBuffer device_x(x), device_w(w);
    const auto run = [&] {
      DeviceBuffer y(expected.size() * sizeof(Bf16));
      EXPECT_TRUE(projections->Multiply(shape, 0.25f, device_x.as<Bf16>(), device_w.as<Bf16>(),
                                        y.as<Bf16>(), nullptr));
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ExpectClose(y.Download<Bf16>(), expected, 1e-3);
    };
    run();
    int tried = 0;
    projections->Tune(shape, 6, [&] {
      run();  // every candidate is right, not only the one that is chosen
      return 1.0 / ++tried;
    });
    EXPECT_GT(tried, 1);
    run();
    const ProjectionShape wide = {rows, shape.inputs, shape.outputs, ProjectionOutput::kF32};
    DeviceBuffer y(expected.size() * sizeof(float));
    ASSERT_TRUE(projections->Multiply(wide, 0.25f, device_x.as<Bf16>(), device_w.as<Bf16>(),
                                      y.as<float>(), nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<float> found = y.Download<float>();
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-4);
  }
}

}  // namespace
}  // namespace crumb::models::cuda
