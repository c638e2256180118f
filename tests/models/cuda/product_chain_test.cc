// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/product_chain.h"

#include <cmath>
#include <random>
#include <vector>

#include "kernels/bf16.h"
#include "models/cuda/layer_kernels.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/random_inputs.h"
#include "tests/models/cuda/rows.h"

namespace crumb::models::cuda {
namespace {

using kernels::Bf16;
using kernels::Bf16FromFloat;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::HaveDevice;
using kernels::cuda::RandomRows;

constexpr float kEpsilon = 1e-6f;

std::vector<Bf16> Rounded(const std::vector<double>& values) {
  std::vector<Bf16> rounded;
  for (const double x : values) rounded.push_back(Bf16FromFloat(static_cast<float>(x)));
  return rounded;
}

// A product whose rows and weights are in host and device memory.
struct Matrix {
  Matrix(int inputs_of, int outputs_of, std::mt19937& random)
      : inputs(inputs_of),
        outputs(outputs_of),
        w(RandomRows(size_t{1} * inputs * outputs, 1.0, random)),
        norm(RandomRows(inputs, 1.0, random)),
        device_w(w),
        device_norm(norm) {}

  ChainProduct Of(ChainOutput output, const DeviceBuffer& x, bool normalized,
                  const DeviceBuffer& y) const {
    const float scale = 1.0f / std::sqrt(static_cast<float>(inputs));
    return {inputs,
            outputs,
            output,
            scale,
            x.as<Bf16>(),
            normalized ? device_norm.as<Bf16>() : nullptr,
            device_w.as<Bf16>(),
            y.as<void>()};
  }

  // Computes in double precision; normalised rows are rounded to bf16 as on the device.
  std::vector<double> Expected(const std::vector<Bf16>& x, int rows, bool normalized) const {
    std::vector<double> y;
    for (int r = 0; r < rows; ++r) {
      const Bf16* row = x.data() + size_t{1} * r * inputs;
      std::vector<Bf16> in(row, row + inputs);
      if (normalized) in = Rounded(Normalized(row, norm.data(), inputs, kEpsilon));
      for (int o = 0; o < outputs; ++o) {
        double sum = 0;
        for (int i = 0; i < inputs; ++i) sum += Value(in[i]) * Value(w[size_t{1} * o * inputs + i]);
        y.push_back(sum / std::sqrt(double(inputs)));
      }
    }
    return y;
  }

  int inputs, outputs;
  std::vector<Bf16> w, norm;
  DeviceBuffer device_w, device_norm;
};

std::vector<double> Gated(const std::vector<double>& gate_up, int rows) {
  const size_t width = gate_up.size() / rows / 2;
  std::vector<double> out;
  for (int r = 0; r < rows; ++r) {
    for (size_t i = 0; i < width; ++i) {
      const double gate = gate_up[2 * r * width + i];
      out.push_back(gate / (1 + std::exp(-gate)) * gate_up[(2 * r + 1) * width + i]);
    }
  }
  return out;
}

std::vector<double> Sum(std::vector<double> a, const std::vector<Bf16>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += Value(b[i]);
  return a;
}

bool Served() {
  ProductChain chain;
  return ServesChain(chain);
}

#define CRUMB_NEEDS_CHAINS() \
  CRUMB_NEEDS_DEVICE();      \
  if (!Served()) GTEST_SKIP() << "needs compute capability 9.0, for bulk copies"

struct Case {
  int inputs, outputs;
};

class ProductChainTest : public testing::TestWithParam<Case> {};

TEST_P(ProductChainTest, OneProductAgreesWithDoublePrecision) {
  CRUMB_NEEDS_CHAINS();
  std::mt19937 random(GetParam().inputs + GetParam().outputs);
  const Matrix matrix(GetParam().inputs, GetParam().outputs, random);
  const bool normalized = matrix.inputs <= 8192;
  DeviceBuffer barrier(std::vector<uint32_t>{0});
  for (int rows = 1; rows <= kFewRows; ++rows) {
    const std::vector<Bf16> x = RandomRows(size_t{1} * rows * matrix.inputs, 2.0, random);
    const std::vector<Bf16> before = RandomRows(size_t{1} * rows * matrix.outputs, 1.0, random);
    const DeviceBuffer device_x(x);
    const std::vector<double> plain = matrix.Expected(x, rows, false);
    const auto run = [&](ChainOutput output, bool norm, const DeviceBuffer& y) {
      ProductChain chain;
      chain.rows = rows;
      chain.products[0] = matrix.Of(output, device_x, norm, y);
      chain.barrier = barrier.as<uint32_t>();
      ASSERT_CUDA(MultiplyChain(chain, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());
    };
    const DeviceBuffer stored(plain.size() * 2), wide(plain.size() * 4), added(before);
    run(ChainOutput::kStore, normalized, stored);
    ExpectClose(stored.Download<Bf16>(), matrix.Expected(x, rows, normalized), 2e-3);
    run(ChainOutput::kF32, false, wide);
    const std::vector<float> found = wide.Download<float>();
    for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], plain[i], 1e-4) << i;
    run(ChainOutput::kAdd, false, added);
    ExpectClose(added.Download<Bf16>(), Sum(plain, before), 1e-4);
    if (matrix.outputs % 2 != 0) continue;
    const DeviceBuffer gated(plain.size());
    run(ChainOutput::kGate, false, gated);
    ExpectClose(gated.Download<Bf16>(), Gated(plain, rows), 1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ProductChainTest,
                         testing::Values(Case{32, 1}, Case{96, 7}, Case{1280, 132}, Case{1312, 160},
                                         Case{2560, 2560}, Case{4096, 1055}, Case{9728, 300},
                                         Case{12288, 2112}));

// The products between two attentions are chained, several layers in a graph; each layer is
// launched before the previous one has ended.
TEST(ProductChainTest, LayersAgreeWithDoublePrecision) {
  CRUMB_NEEDS_CHAINS();
  constexpr int kHidden = 2560, kQ = 4096, kFfn = 3232, kNext = 704, kLayers = 3;
  for (const int rows : {1, 3, 4}) {
    std::mt19937 random(rows);
    const Matrix out(kQ, kHidden, random), up(kHidden, 2 * kFfn, random),
        down(kFfn, kHidden, random), next(kHidden, kNext, random);
    const std::vector<Bf16> attended = RandomRows(size_t{1} * rows * kQ, 1.0, random);
    std::vector<Bf16> residual = RandomRows(size_t{1} * rows * kHidden, 1.0, random);
    const DeviceBuffer device_attended(attended), device_residual(residual);
    const DeviceBuffer gated(size_t{2} * rows * kFfn), qkv(size_t{2} * rows * kNext);
    const DeviceBuffer barrier(std::vector<uint32_t>{0});
    ProductChain chain;
    chain.rows = rows;
    chain.count = 4;
    chain.products[0] = out.Of(ChainOutput::kAdd, device_attended, false, device_residual);
    chain.products[1] = up.Of(ChainOutput::kGate, device_residual, true, gated);
    chain.products[2] = down.Of(ChainOutput::kAdd, gated, false, device_residual);
    chain.products[3] = next.Of(ChainOutput::kStore, device_residual, true, qkv);
    chain.barrier = barrier.as<uint32_t>();
    cudaStream_t stream;
    ASSERT_CUDA(cudaStreamCreate(&stream));
    ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int layer = 0; layer < kLayers; ++layer) ASSERT_CUDA(MultiplyChain(chain, stream));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
    ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    ASSERT_CUDA(cudaGraphLaunch(executable, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    std::vector<double> expected_next;
    for (int layer = 0; layer < kLayers; ++layer) {
      residual = Rounded(Sum(out.Expected(attended, rows, false), residual));
      const auto gate = Rounded(Gated(up.Expected(residual, rows, true), rows));
      residual = Rounded(Sum(down.Expected(gate, rows, false), residual));
      expected_next = next.Expected(residual, rows, true);
    }
    std::vector<double> expected_residual;
    for (const Bf16 x : residual) expected_residual.push_back(Value(x));
    ExpectClose(device_residual.Download<Bf16>(), expected_residual, 0.06);
    ExpectClose(qkv.Download<Bf16>(), expected_next, 0.06);
    EXPECT_EQ(barrier.Download<uint32_t>()[0] & 0x7fffffffu, 0u);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST(ProductChainTest, RefusesWhatItDoesNotServe) {
  CRUMB_NEEDS_CHAINS();
  const auto refused = [](ProductChain chain) {
    EXPECT_FALSE(ServesChain(chain));
    EXPECT_EQ(MultiplyChain(chain, nullptr), cudaErrorInvalidValue);
  };
  ProductChain chain;
  chain.rows = kFewRows + 1;
  refused(chain);
  chain.rows = 0;
  refused(chain);
  chain = {};
  chain.count = kChainProductsMax + 1;
  refused(chain);
  chain = {};
  chain.products[0].inputs = 40;
  refused(chain);
  chain.products[0].inputs = 1 << 17;  // rows that do not fit
  refused(chain);
  chain.rows = kFewRows;
  chain.products[0].inputs = 20000;  // rows that leave the ring too little
  refused(chain);
  chain.rows = 1;
  EXPECT_TRUE(ServesChain(chain));
  const Bf16 weight[1] = {};
  chain.products[0].inputs = 8224;
  EXPECT_TRUE(ServesChain(chain));
  chain.products[0].norm_weight = weight;
  refused(chain);
  chain = {};
  chain.products[0].outputs = 3;
  chain.products[0].output = ChainOutput::kGate;
  refused(chain);
}

}  // namespace
}  // namespace crumb::models::cuda
