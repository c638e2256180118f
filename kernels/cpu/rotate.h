// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu/scratch.h"

// Multiplication of rows by a d x d matrix. V is one of the Simd types.
namespace crumb::kernels {

// Computes out[row] = in[row] M for kRows rows of `dim`, M row-major. Each element is summed in
// ascending order of the inner index with separate multiplication and addition, so every
// instruction set produces the same bits.
template <typename V, int kRows>
void MultiplyRows(const float* in, int dim, const float* matrix, float* out) {
  constexpr int kVectors = V::kRotateVectors;
  for (int j = 0; j < dim; j += kVectors * V::kLanes) {
    typename V::F sum[kRows][kVectors];
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) sum[row][v] = V::Set(0.0f);
    }
    for (int i = 0; i < dim; ++i) {
      typename V::F m[kVectors];
      for (int v = 0; v < kVectors; ++v) m[v] = V::Load(matrix + i * dim + j + v * V::kLanes);
      for (int row = 0; row < kRows; ++row) {
        const typename V::F x = V::Set(in[row * dim + i]);
        for (int v = 0; v < kVectors; ++v) sum[row][v] = V::Add(sum[row][v], V::Mul(x, m[v]));
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        V::Store(out + row * dim + j + v * V::kLanes, sum[row][v]);
      }
    }
  }
}

// Computes out[row] = in[row] M for any number of rows. REQUIRES: `in` and `out` do not overlap.
template <typename V>
void RotateRows(const float* in, int rows, int dim, const float* matrix, float* out) {
  ForRowBlocks<4>(0, rows, [&](auto count, int row) {
    MultiplyRows<V, count>(in + row * dim, dim, matrix, out + row * dim);
  });
}

// Computes out[row] = in[row] M' for kRows rows, as dot products with four rows of M at a time.
template <typename V, int kRows>
void MultiplyRowsTransposed(const float* in, int dim, const float* matrix, float* out) {
  for (int i = 0; i < dim; i += 4) {
    typename V::F sum[kRows][4];
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < 4; ++k) sum[row][k] = V::Set(0.0f);
    }
    for (int j = 0; j < dim; j += V::kLanes) {
      typename V::F m[4];
      for (int k = 0; k < 4; ++k) m[k] = V::Load(matrix + (i + k) * dim + j);
      for (int row = 0; row < kRows; ++row) {
        const typename V::F x = V::Load(in + row * dim + j);
        for (int k = 0; k < 4; ++k) sum[row][k] = V::Fma(x, m[k], sum[row][k]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      V::ReduceAdd4(sum[row][0], sum[row][1], sum[row][2], sum[row][3], out + row * dim + i);
    }
  }
}

// Computes out[row] = in[row] M' for any number of rows. REQUIRES: `in` and `out` do not overlap.
template <typename V>
void InverseRotateRows(const float* in, int rows, int dim, const float* matrix, float* out) {
  ForRowBlocks<V::kBf16ScoreRows>(0, rows, [&](auto count, int row) {
    MultiplyRowsTransposed<V, count>(in + row * dim, dim, matrix, out + row * dim);
  });
}

}  // namespace crumb::kernels
