// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/tensor.h"

// The inner loops of the engine's matrix products, one set per instruction set. They take pointers
// and sizes, run on the calling thread and allocate nothing. They compute in f32 and read weights
// as they are stored.
namespace crumb::models {

// Columns of a packed panel, the same for all instruction sets.
inline constexpr int kPanelColumns = 32;
// Rows of x that one call of `dot` takes.
inline constexpr int kDotRowsMax = 4;

struct MatmulKernels {
  // panel[k * 32 + j] = row j's element k, zero for rows <= j < 32.
  // source  `rows` (at most 32) rows of `depth` elements of `dtype` (kBf16 or kF32), row_bytes
  // apart panel   [depth, 32]
  void (*pack)(DType dtype, const std::byte* source, int64_t row_bytes, int rows, int depth,
               float* panel);

  // c (+)= a b.
  // a [m, depth], rows lda apart; b [depth, n], rows ldb apart; c [m, n], rows ldc apart.
  // n a multiple of 32.
  void (*multiply)(int m, int n, int depth, const float* a, int64_t lda, const float* b,
                   int64_t ldb, float* c, int64_t ldc, bool accumulate);

  // out[i * out_stride + j] = sum over k of x[i * x_stride + k] * row j's element k, for i < m
  // (at most kDotRowsMax), j < rows. source as in pack, any number of rows.
  void (*dot)(DType dtype, const std::byte* source, int64_t row_bytes, int rows, int depth, int m,
              const float* x, int64_t x_stride, float* out, int64_t out_stride);

  // to[i] = element i as f32, i < count.
  void (*widen)(DType dtype, const std::byte* source, int64_t count, float* to);
};

extern const MatmulKernels kPortableMatmul;
#if defined(__x86_64__)
extern const MatmulKernels kAvx2Matmul;
extern const MatmulKernels kAvx512Matmul;
#endif

// Returns the kernels for kernels::ActiveCpuIsa().
const MatmulKernels& ActiveMatmulKernels();

}  // namespace crumb::models
