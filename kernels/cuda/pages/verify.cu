// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/verify.h"

#include <algorithm>

#include "kernels/cuda/common/crc32c.cuh"

namespace crumb::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerProcessor = 3;
constexpr int kAhead = 5;  // units asked for before they are summed

struct AllColumns {
  crc::Columns unit[crc::kUnitsMax];
};
constexpr AllColumns MakeAllColumns() {
  AllColumns all{};
  for (int i = 0; i < crc::kUnitsMax; ++i) all.unit[i] = crc::MakeColumns(i * crc::kUnitBytes);
  return all;
}
__device__ const AllColumns kColumns = MakeAllColumns();

// A tile's units as this lane sees them. The first unit is filled up with zeros in front, which
// change no plain sum.
struct TileReader {
  const uint4* at;  // this lane's words of the first unit
  bool whole;       // whether the first unit has them

  __device__ __forceinline__ uint4 Unit(int i) const {
    if (i == 0 && !whole) return make_uint4(0, 0, 0, 0);
    return __ldcs(at + i * (crc::kUnitBytes / 16));
  }
};

__device__ __forceinline__ TileReader ReaderOf(const VerifyParams& p, int64_t tile, int units) {
  const int missing = units * crc::kUnitBytes - static_cast<int>(p.tile_bytes);
  const int lane_begin = 16 * static_cast<int>(threadIdx.x % 32);
  const uint64_t address = p.run_address[tile / p.tiles_per_run] +
                           tile % p.tiles_per_run * p.tile_bytes - missing + lane_begin;
  return {reinterpret_cast<const uint4*>(address), lane_begin >= missing};
}

__device__ __forceinline__ void Report(const VerifyParams& p, int64_t tile, uint32_t sum) {
  if (p.found != nullptr) p.found[tile] = sum;
  if (p.status == nullptr || p.sums[tile] == sum) return;
  const int bit = min(static_cast<int>(tile % p.tiles_per_run), 31);
  atomicOr(p.status + tile / p.tiles_per_run, 1u << bit);
}

// One warp a tile; the columns of all units lie in shared memory.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    VerifyKernel(const __grid_constant__ VerifyParams p, int units, uint32_t sum_of_zeros) {
  extern __shared__ uint4 columns[];  // [units][2][32]
  for (int i = threadIdx.x; i < units * 64; i += kThreads) {
    const int unit = i / 64, half = i / 32 % 2, lane = i % 32;
    columns[i] = reinterpret_cast<const uint4*>(kColumns.unit[units - 1 - unit].word[lane])[half];
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const uint4* rows = reinterpret_cast<const uint4*>(crc::kRows.word[lane]);
  const int64_t tiles = static_cast<int64_t>(p.runs) * p.tiles_per_run;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; tile < tiles;
       tile += step) {
    const TileReader reader = ReaderOf(p, tile, units);
    crc::PlainSum sum;
    for (int first = 0; first < units; first += kAhead) {
      uint4 words[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i < units) words[i] = reader.Unit(first + i);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= units) break;
        const uint4* column = columns + (first + i) * 64 + lane;
        sum.Add(words[i], column[0], column[32]);
      }
    }
    const uint32_t found = sum.Result(rows) ^ sum_of_zeros;
    if (lane == 0) Report(p, tile, found);
  }
}

}  // namespace

bool VerifySupported(size_t tile_bytes) {
  return tile_bytes > 0 && tile_bytes % 16 == 0 &&
         tile_bytes <= static_cast<size_t>(crc::kUnitBytes) * crc::kUnitsMax;
}

cudaError_t VerifyTiles(const VerifyParams& p, cudaStream_t stream) {
  if (!VerifySupported(p.tile_bytes) || p.runs < 0 || p.tiles_per_run < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.runs == 0) return cudaSuccess;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const int units = static_cast<int>((p.tile_bytes + crc::kUnitBytes - 1) / crc::kUnitBytes);
  const int64_t tiles = static_cast<int64_t>(p.runs) * p.tiles_per_run;
  const int64_t blocks =
      std::min<int64_t>(kBlocksPerProcessor * processors, (tiles + kWarps - 1) / kWarps);
  VerifyKernel<<<static_cast<int>(blocks), kThreads, units * 2 * crc::kUnitBytes, stream>>>(
      p, units, crc::SumOfZeros(p.tile_bytes));
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
