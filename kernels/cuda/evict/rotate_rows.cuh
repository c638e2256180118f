// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/evict/constants.h"

// Multiplication of rows by R on the tensor cores. A row is exact in bf16, and R is the sum of two
// bf16 parts, so y is accurate to 2^-18 of the row; with a third part the only error is truncation
// in the tensor cores.
namespace crumb::kernels::cuda {

// Rows r and r + 8 as pairs of channels, in the order of MMA operands: x[n][a] is channels 8 n + 2
// c and 8 n + 2 c + 1 of row r + 8 a.
template <int kDim>
using RowPairs = uint32_t[kDim / 8][2];

// Bytes from one row to the next in shared memory. The padding puts the 16-byte pieces of 8 rows
// into different banks.
template <int kDim>
inline constexpr int kRowPitch = 2 * kDim + 16;

template <int kDim>
__device__ __forceinline__ void ReadRows(uint32_t rows, RowPairs<kDim>& x) {
  const uint32_t at = rows + threadIdx.x % 16 * kRowPitch<kDim> + threadIdx.x % 32 / 16 * 16;
#pragma unroll
  for (int s = 0; s < kDim / 16; ++s) {
    uint32_t four[4];
    ptx::LoadMatrices(four, at + 32 * s);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * s + i / 2][i % 2] = four[i];
  }
}

// Returns the i-th part of R to multiply. Low parts come first: tensor cores round every sum down,
// so few sums should be large.
template <int kDim, int kParts>
__device__ __forceinline__ constexpr int PartInOrder(int i) {
  constexpr int kChunks = kDim / kChunkChannels;
  return i % kChunks * kRotationParts<kDim> + kParts - 1 - i / kChunks;
}

// y += x times one part of R, by mma.sync (any device).
template <int kDim>
__device__ __forceinline__ void RotateByPart(const RowPairs<kDim>& x, int chunk, uint32_t part,
                                             float (&y)[kDim / 8][4]) {
  const int lane = threadIdx.x % 32;
  // Matrix lane / 8 of a load holds columns + 8 (lane / 16) and inner index + 8 (lane / 8 % 2).
  const uint32_t row = part + (8 * (lane / 16) + lane % 8) * 128;
#pragma unroll
  for (int s = 0; s < kChunkChannels / 16; ++s) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The chunk is a run-time value, but a register index must be a constant.
      a[i] = 0;
#pragma unroll
      for (int q = 0; q < kDim / kChunkChannels; ++q) {
        if (q == chunk) a[i] = x[2 * (4 * q + s) + i / 2][i % 2];
      }
    }
    const uint32_t at = row + (((2 * s + lane / 8 % 2) ^ (lane % 8)) * 16);
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      uint32_t b[4];
      ptx::LoadMatrices(b, at + n * 1024);
      ptx::MmaBf16(y[n], a, b[0], b[1]);
      ptx::MmaBf16(y[n + 1], a, b[2], b[3]);
    }
  }
}

// The mean as three bf16 parts: an operand of 16 inner channels of which only the first 3 are not
// zero.
template <int kDim>
inline constexpr int kMeanBytes = 16 * kDim;

// Returns one column of that operand; `mean` is the column's.
__device__ __forceinline__ uint4 MeanColumn(float mean) {
  const float high = ptx::LowBf16(ptx::PackBf16(-mean, 0.0f));
  const float middle = ptx::LowBf16(ptx::PackBf16(-mean - high, 0.0f));
  return make_uint4(ptx::PackBf16(high, middle), ptx::PackBf16(-mean - high - middle, 0.0f), 0, 0);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Starts y += x R - mean by wgmma, for the 64 rows of a warpgroup. `rotation` is the address of all
// parts, `mean` that of kMeanBytes. x and y must not be used before WaitWgmma.
template <int kDim>
__device__ __forceinline__ void StartRotation(const RowPairs<kDim>& x, uint32_t rotation,
                                              uint32_t mean, float (&y)[kDim / 8][4]) {
  ptx::FenceWgmma();
  // A reduction puts the values into uniform registers, where descriptors must be.
  rotation = __reduce_or_sync(~0u, rotation);
  mean = __reduce_or_sync(~0u, mean);
  const int c = threadIdx.x % 4;
  const uint32_t ones = c == 0 ? 0x3f803f80u : (c == 1 ? 0x3f80u : 0u);
  const uint32_t once[4] = {ones, ones, 0, 0};
  ptx::WgmmaBf16<kDim / 8>(y, once, ptx::NarrowMatrix(mean));
#pragma unroll
  for (int i = 0; i < 2 * kDim / kChunkChannels; ++i) {
    const int part = PartInOrder<kDim, 2>(i);
    const uint64_t matrix = ptx::SwizzledMatrix(rotation + part * kPartBytes<kDim>);
#pragma unroll
    for (int s = 0; s < kChunkChannels / 16; ++s) {
      const int at = 2 * (4 * (part / 2) + s);
      const uint32_t a[4] = {x[at][0], x[at][1], x[at + 1][0], x[at + 1][1]};
      ptx::WgmmaBf16<kDim / 8>(y, a, matrix + 2 * s);
    }
  }
  ptx::CommitWgmma();
}
#endif

// y += rows without rotation: channel 8 n + 2 c + e of a lane.
template <int kDim>
__device__ __forceinline__ void SpreadRows(const RowPairs<kDim>& x, float (&y)[kDim / 8][4]) {
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      y[n][2 * a] += ptx::LowBf16(x[n][a]);
      y[n][2 * a + 1] += ptx::HighBf16(x[n][a]);
    }
  }
}

}  // namespace crumb::kernels::cuda
