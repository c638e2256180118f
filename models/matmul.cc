// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/matmul.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu_isa.h"
#include "kernels/fp16.h"

namespace crumb::models {

namespace {

// The depth of a panel of 32 columns: 32 KB of f32, which stay in the first-level cache.
constexpr int kDepthBlock = 256;
// Rows of x up to which it is faster to read the weights once per four rows than to pack them.
constexpr int kDotRowsTotal = 8;
// Multiplications below which waking other threads costs more time than it saves.
constexpr int64_t kParallelProductsMin = int64_t{1} << 19;

// Computes outputs [begin, end) of few rows. Reading the weights limits it, so they are not copied.
void MultiplyFew(const Matrix& weight, int begin, int end, int n, const float* x, float* out) {
  const MatmulKernels& kernels = ActiveMatmulKernels();
  for (int i = 0; i < n; i += kDotRowsMax) {
    kernels.dot(weight.dtype(), weight.row(begin), weight.row_bytes(), end - begin,
                weight.columns(), std::min(kDotRowsMax, n - i), x + int64_t{i} * weight.columns(),
                weight.columns(), out + int64_t{i} * weight.rows() + begin, weight.rows());
  }
}

// Computes outputs [begin, begin + 32) of many rows. `edge` holds the outputs of a narrower panel.
void MultiplyPanel(const Matrix& weight, int begin, int n, const float* x, float* out) {
  const MatmulKernels& kernels = ActiveMatmulKernels();
  const int width = std::min(kPanelColumns, weight.rows() - begin);
  std::vector<float> edge(width < kPanelColumns ? size_t{kPanelColumns} * n : 0);
  float* target = edge.empty() ? out + begin : edge.data();
  const int64_t target_stride = edge.empty() ? weight.rows() : kPanelColumns;
  alignas(64) float panel[kDepthBlock * kPanelColumns];
  for (int k = 0; k < weight.columns(); k += kDepthBlock) {
    const int depth = std::min(kDepthBlock, weight.columns() - k);
    kernels.pack(weight.dtype(), weight.row(begin) + k * DTypeBytes(weight.dtype()),
                 weight.row_bytes(), width, depth, panel);
    kernels.multiply(n, kPanelColumns, depth, x + k, weight.columns(), panel, kPanelColumns, target,
                     target_stride, k > 0);
  }
  if (edge.empty()) return;
  for (int i = 0; i < n; ++i) {
    std::copy_n(edge.data() + int64_t{i} * kPanelColumns, width,
                out + int64_t{i} * weight.rows() + begin);
  }
}

}  // namespace

const MatmulKernels& ActiveMatmulKernels() {
#if defined(__x86_64__)
  const kernels::CpuIsa isa = kernels::ActiveCpuIsa();
  if (isa >= kernels::CpuIsa::kAvx512) return kAvx512Matmul;
  if (isa >= kernels::CpuIsa::kAvx2) return kAvx2Matmul;
#endif
  return kPortableMatmul;
}

std::vector<float> ToFloats(const Tensor& tensor) {
  std::vector<float> values(tensor.bytes.size() / DTypeBytes(tensor.dtype));
  if (tensor.dtype != DType::kF16) {
    ActiveMatmulKernels().widen(tensor.dtype, tensor.bytes.data(),
                                static_cast<int64_t>(values.size()), values.data());
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, tensor.bytes.data() + 2 * i, sizeof(half));
    values[i] = kernels::Fp16ToFloat(half);
  }
  return values;
}

Matrix Matrix::Of(const Tensor& tensor) {
  Matrix matrix;
  matrix.rows_ = static_cast<int>(tensor.shape[0]);
  matrix.columns_ = static_cast<int>(tensor.shape[1]);
  matrix.dtype_ = tensor.dtype;
  matrix.data_ = tensor.bytes.data();
  if (tensor.dtype == DType::kF16) {
    matrix.owned_ = ToFloats(tensor);
    matrix.dtype_ = DType::kF32;
    matrix.data_ = reinterpret_cast<const std::byte*>(matrix.owned_.data());
  }
  return matrix;
}

void Multiply(const Matrix& weight, int n, const float* x, float* out, ThreadPool& pool) {
  const bool few = n <= kDotRowsTotal;
  const int panels = (weight.rows() + kPanelColumns - 1) / kPanelColumns;
  const bool alone = int64_t{n} * weight.rows() * weight.columns() < kParallelProductsMin;
  // With few rows, every thread has one range of outputs, so that it reads the weights in order.
  const int tasks = alone ? 1 : few ? std::min(pool.threads(), panels) : panels;
  pool.ParallelFor(tasks, [&](int task) {
    const int begin = static_cast<int>(int64_t{panels} * task / tasks) * kPanelColumns;
    const int end = std::min<int>(
        static_cast<int>(int64_t{panels} * (task + 1) / tasks) * kPanelColumns, weight.rows());
    if (few) return MultiplyFew(weight, begin, end, n, x, out);
    for (int j = begin; j < end; j += kPanelColumns) MultiplyPanel(weight, j, n, x, out);
  });
}

}  // namespace crumb::models
