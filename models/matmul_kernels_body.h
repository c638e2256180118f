// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bodies of MatmulKernels, included once by each instruction set's source, which is compiled for
// that set. Everything here has internal linkage and uses no library function: an inline function
// shared with other sources could otherwise be linked in its AVX-512 form into the portable path.

#include "models/matmul_kernels.h"

namespace crumb::models {

namespace {

// A register of CRUMB_MATMUL_WIDTH floats, a tile of CRUMB_MATMUL_ROWS rows times two registers.
constexpr int kWidth = CRUMB_MATMUL_WIDTH;
constexpr int kTileRows = CRUMB_MATMUL_ROWS;
constexpr int kTileColumns = 2 * kWidth;
static_assert(kPanelColumns % kTileColumns == 0);

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));

// Load and store one register at any alignment.
inline Floats Load(const void* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

inline void Store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof(value)); }

// Returns a register whose elements all have the value.
inline Floats Broadcast(float value) { return Floats{} + value; }

// Loads a register of elements of a stored type as f32.
template <DType kDType>
inline Floats LoadWide(const std::byte* from) {
  if constexpr (kDType == DType::kF32) return Load(from);
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  const Words words = __builtin_convertvector(halves, Words) << 16;
  return reinterpret_cast<Floats>(words);
}

// Loads one element of a stored type as f32, for the rest of a row behind whole registers.
template <DType kDType>
inline float LoadOne(const std::byte* from) {
  float value;
  if constexpr (kDType == DType::kF32) {
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t half;
  __builtin_memcpy(&half, from, sizeof(half));
  const uint32_t word = static_cast<uint32_t>(half) << 16;
  __builtin_memcpy(&value, &word, sizeof(value));
  return value;
}

// Returns the sum of a register's elements, added from the first to the last.
inline float Sum(Floats value) {
  float sum = 0.0f;
  for (int i = 0; i < kWidth; ++i) sum += value[i];
  return sum;
}

// Transposes rows into a panel of 32 columns and fills missing columns with zeros.
template <DType kDType>
void PackRows(const std::byte* source, int64_t row_bytes, int rows, int depth, float* panel) {
  constexpr int kBytes = DTypeBytes(kDType);
  for (int j = 0; j < rows; ++j) {
    const std::byte* row = source + j * row_bytes;
    for (int k = 0; k < depth; ++k)
      panel[k * kPanelColumns + j] = LoadOne<kDType>(row + k * kBytes);
  }
  for (int k = 0; k < depth; ++k) {
    for (int j = rows; j < kPanelColumns; ++j) panel[k * kPanelColumns + j] = 0.0f;
  }
}

void Pack(DType dtype, const std::byte* source, int64_t row_bytes, int rows, int depth,
          float* panel) {
  if (dtype == DType::kBf16) {
    PackRows<DType::kBf16>(source, row_bytes, rows, depth, panel);
  } else {
    PackRows<DType::kF32>(source, row_bytes, rows, depth, panel);
  }
}

// A tile of kRows x kTileColumns of c stays in registers over the whole depth.
template <int kRows>
inline void MultiplyTile(int depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                         float* c, int64_t ldc, bool accumulate) {
  Floats sum[kRows][2];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    sum[i][0] = accumulate ? Load(c + i * ldc) : Floats{};
    sum[i][1] = accumulate ? Load(c + i * ldc + kWidth) : Floats{};
  }
  for (int k = 0; k < depth; ++k) {
    const Floats b0 = Load(b + k * ldb);
    const Floats b1 = Load(b + k * ldb + kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Floats value = Broadcast(a[i * lda + k]);
      sum[i][0] += value * b0;
      sum[i][1] += value * b1;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    Store(c + i * ldc, sum[i][0]);
    Store(c + i * ldc + kWidth, sum[i][1]);
  }
}

// MatmulKernels::multiply: tiles of kTileRows rows, then single rows for the rest.
void Multiply(int m, int n, int depth, const float* a, int64_t lda, const float* b, int64_t ldb,
              float* c, int64_t ldc, bool accumulate) {
  for (int j = 0; j < n; j += kTileColumns) {
    int i = 0;
    for (; i + kTileRows <= m; i += kTileRows) {
      MultiplyTile<kTileRows>(depth, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc,
                              accumulate);
    }
    for (; i < m; ++i) {
      MultiplyTile<1>(depth, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, accumulate);
    }
  }
}

// Dot products of kRows rows of x with every stored row: each stored row is read once, in two
// registers at a time.
template <DType kDType, int kRows>
inline void DotRows(const std::byte* source, int64_t row_bytes, int rows, int depth, const float* x,
                    int64_t x_stride, float* out, int64_t out_stride) {
  constexpr int kBytes = DTypeBytes(kDType);
  for (int j = 0; j < rows; ++j) {
    const std::byte* row = source + j * row_bytes;
    Floats sum[kRows][2] = {};
    int k = 0;
    for (; k + 2 * kWidth <= depth; k += 2 * kWidth) {
      const Floats w0 = LoadWide<kDType>(row + k * kBytes);
      const Floats w1 = LoadWide<kDType>(row + (k + kWidth) * kBytes);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        sum[i][0] += Load(x + i * x_stride + k) * w0;
        sum[i][1] += Load(x + i * x_stride + k + kWidth) * w1;
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      float total = Sum(sum[i][0] + sum[i][1]);
      for (int rest = k; rest < depth; ++rest) {
        total += x[i * x_stride + rest] * LoadOne<kDType>(row + rest * kBytes);
      }
      out[i * out_stride + j] = total;
    }
  }
}

template <DType kDType>
void DotOf(const std::byte* source, int64_t row_bytes, int rows, int depth, int m, const float* x,
           int64_t x_stride, float* out, int64_t out_stride) {
  static_assert(kDotRowsMax == 4);
  if (m == 1)
    return DotRows<kDType, 1>(source, row_bytes, rows, depth, x, x_stride, out, out_stride);
  if (m == 2)
    return DotRows<kDType, 2>(source, row_bytes, rows, depth, x, x_stride, out, out_stride);
  if (m == 3)
    return DotRows<kDType, 3>(source, row_bytes, rows, depth, x, x_stride, out, out_stride);
  if (m == 4)
    return DotRows<kDType, 4>(source, row_bytes, rows, depth, x, x_stride, out, out_stride);
}

// MatmulKernels::dot: chooses the body by type and by the number of rows of x.
void Dot(DType dtype, const std::byte* source, int64_t row_bytes, int rows, int depth, int m,
         const float* x, int64_t x_stride, float* out, int64_t out_stride) {
  if (dtype == DType::kBf16) {
    DotOf<DType::kBf16>(source, row_bytes, rows, depth, m, x, x_stride, out, out_stride);
  } else {
    DotOf<DType::kF32>(source, row_bytes, rows, depth, m, x, x_stride, out, out_stride);
  }
}

template <DType kDType>
void WidenOf(const std::byte* source, int64_t count, float* to) {
  constexpr int kBytes = DTypeBytes(kDType);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) Store(to + i, LoadWide<kDType>(source + i * kBytes));
  for (; i < count; ++i) to[i] = LoadOne<kDType>(source + i * kBytes);
}

void Widen(DType dtype, const std::byte* source, int64_t count, float* to) {
  if (dtype == DType::kBf16) return WidenOf<DType::kBf16>(source, count, to);
  WidenOf<DType::kF32>(source, count, to);
}

}  // namespace

}  // namespace crumb::models
