// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tensor.h"
#include "models/matmul_kernels.h"
#include "models/thread_pool.h"

namespace crumb::models {

// A linear layer's weight [rows, columns]; row j yields output j. bf16 and f32 weights are read
// from the mapped checkpoint, f16 weights are converted to f32. Move-only.
class Matrix {
 public:
  Matrix() = default;
  Matrix(Matrix&&) = default;
  Matrix& operator=(Matrix&&) = default;

  // REQUIRES: `tensor` has two dimensions, and its bytes outlive the matrix.
  static Matrix Of(const Tensor& tensor);

  // Returns the number of outputs and of inputs, and the type in which elements are stored.
  int rows() const { return rows_; }
  int columns() const { return columns_; }
  DType dtype() const { return dtype_; }
  int64_t row_bytes() const { return int64_t{columns_} * static_cast<int64_t>(DTypeBytes(dtype_)); }
  // Returns the elements of row `j`, of type dtype().
  const std::byte* row(int64_t j) const { return data_ + j * row_bytes(); }

 private:
  int rows_ = 0;
  int columns_ = 0;
  DType dtype_ = DType::kF32;  // kBf16 or kF32
  const std::byte* data_ = nullptr;
  std::vector<float> owned_;  // the converted weight, to which data_ then points
};

// Returns all elements of a tensor of any DType as f32.
std::vector<float> ToFloats(const Tensor& tensor);

// Computes out[i, j] = sum over k of x[i, k] * weight[j, k] in f32.
//   x    [n, columns], contiguous
//   out  [n, rows], contiguous
void Multiply(const Matrix& weight, int n, const float* x, float* out, ThreadPool& pool);

}  // namespace crumb::models
