// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Products of rows with a d x d matrix. V is one of the Simd types.
namespace crumb::kernels {

// out[row] = in[row] M for `kRows` rows of `dim`, M row-major. Each element is summed in ascending
// order of the inner index with separate multiplication and addition: the same bits everywhere.
template <typename V, int kRows>
void MultiplyRows(const float* in, int dim, const float* matrix, float* out) {
  constexpr int kVectors = 2;
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

// out[row] = in[row] M for any number of rows; `in` and `out` do not overlap.
template <typename V>
void RotateRows(const float* in, int rows, int dim, const float* matrix, float* out) {
  int row = 0;
  for (; row + 4 <= rows; row += 4)
    MultiplyRows<V, 4>(in + row * dim, dim, matrix, out + row * dim);
  for (; row < rows; ++row) MultiplyRows<V, 1>(in + row * dim, dim, matrix, out + row * dim);
}

// out = in M', one row: four dot products with rows of M at a time.
template <typename V>
void UnrotateRow(const float* in, int dim, const float* matrix, float* out) {
  for (int i = 0; i < dim; i += 4) {
    typename V::F sum[4];
    for (int k = 0; k < 4; ++k) sum[k] = V::Set(0.0f);
    for (int j = 0; j < dim; j += V::kLanes) {
      const typename V::F x = V::Load(in + j);
      for (int k = 0; k < 4; ++k) sum[k] = V::Fma(x, V::Load(matrix + (i + k) * dim + j), sum[k]);
    }
    V::ReduceAdd4(sum[0], sum[1], sum[2], sum[3], out + i);
  }
}

}  // namespace crumb::kernels
