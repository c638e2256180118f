// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/evict_constants.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/sm90_products.cuh"

// Rows times R on the tensor cores. A row is exact in its 16-bit type, R is the sum of two such
// parts, so the product is good to 2^-18 of the row.
namespace crumb::kernels::cuda {

// Rows r and r + 8 of 16 as pairs of channels: x[a][4 p + i] is channels 32 p + 8 c + 2 i.
template <int kDim>
using RowPairs = uint32_t[2][kDim / 8];

// Bytes from a row's begin in shared memory to 16-byte piece `piece`: neighbouring rows use
// different banks.
__device__ __forceinline__ int PieceOffset(int row, int piece) {
  return 16 * (piece ^ (row % 2 * 4));
}

template <int kDim>
__device__ __forceinline__ void ReadRows(uint32_t rows, RowPairs<kDim>& x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const int row = lane / 4 + 8 * a;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const uint4 four =
          ptx::LoadShared128(rows + row * 2 * kDim + PieceOffset(row, 4 * i + lane % 4));
      x[a][4 * i] = four.x, x[a][4 * i + 1] = four.y;
      x[a][4 * i + 2] = four.z, x[a][4 * i + 3] = four.w;
    }
  }
}

// y += x times one part of R, by one warp: any device.
template <int kDim, bool kHalf>
__device__ __forceinline__ void RotateByPart(const RowPairs<kDim>& x, int chunk, uint32_t part,
                                             float (&y)[kDim / 8][4]) {
  const int lane = threadIdx.x % 32;
  // Matrix lane / 8 of a load: columns + 8 (lane / 16), inner index + 8 (lane / 8 % 2).
  const uint32_t row = part + (8 * (lane / 16) + lane % 8) * 128;
#pragma unroll
  for (int s = 0; s < kChunkChannels / 16; ++s) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The chunk is a run-time value, the index must not be.
      a[i] = 0;
#pragma unroll
      for (int q = 0; q < kDim / kChunkChannels; ++q) {
        if (q == chunk) a[i] = x[i % 2][2 * (4 * q + s) + i / 2];
      }
    }
    const uint32_t at = row + (((2 * s + lane / 8 % 2) ^ (lane % 8)) * 16);
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      uint32_t b[4];
      ptx::LoadMatrices(b, at + n * 1024);
      if constexpr (kHalf) {
        ptx::MmaF16(y[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        ptx::MmaF16(y[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      } else {
        ptx::MmaBf16(y[n], a, b[0], b[1]);
        ptx::MmaBf16(y[n + 1], a, b[2], b[3]);
      }
    }
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// y += x R, by the four warps that hold 64 rows. rotation: all parts.
template <int kDim, bool kHalf>
__device__ __forceinline__ void RotateByTeam(const RowPairs<kDim>& x, uint32_t rotation,
                                             float (&y)[kDim / 8][4]) {
  ptx::FenceProducts();
#pragma unroll
  for (int part = 0; part < 2 * kDim / kChunkChannels; ++part) {
    const uint64_t matrix = ptx::SwizzledMatrix(rotation + part * kPartBytes<kDim>);
#pragma unroll
    for (int s = 0; s < kChunkChannels / 16; ++s) {
      const int at = 2 * (4 * (part / 2) + s);
      const uint32_t a[4] = {x[0][at], x[1][at], x[0][at + 1], x[1][at + 1]};
      if constexpr (kHalf) {
        ptx::GroupMmaF16<kDim / 8>(y, a, matrix + 2 * s);
      } else {
        ptx::GroupMmaBf16<kDim / 8>(y, a, matrix + 2 * s);
      }
    }
  }
  ptx::CommitProducts();
  ptx::WaitProducts();
}
#endif

// y += rows as they are: channel 8 n + 2 c + e of a lane.
template <int kDim, bool kHalf>
__device__ __forceinline__ void SpreadRows(const RowPairs<kDim>& x, float (&y)[kDim / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      // The 8 channels of a tile are the four words of lane n % 4.
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t other = __shfl_sync(~0u, x[a][n / 4 * 4 + i], lane / 4 * 4 + n % 4);
        if (lane % 4 == i) word = other;
      }
      y[n][2 * a] += kHalf ? ptx::LowHalf(word) : ptx::LowBf16(word);
      y[n][2 * a + 1] += kHalf ? ptx::HighHalf(word) : ptx::HighBf16(word);
    }
  }
}

}  // namespace crumb::kernels::cuda
