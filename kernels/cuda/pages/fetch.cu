// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/pages.h"

#include <algorithm>

#include "kernels/cuda/common/crc32c.cuh"

namespace crumb::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks per SM that the registers of 9 units in flight leave room for.
constexpr int kBlocksPerProcessor = 3;
// Bounds of a call: they keep indices and byte offsets of tiles within 32 bits.
constexpr size_t kTileBytesMax = 1 << 20;
constexpr int64_t kTilesMax = 1 << 30;
// Units of 512 bytes that a warp has in flight: an INT2 tile at head_dim 128, which has 4,608
// bytes.
constexpr int kUnits = 9;

struct PieceColumns {
  crc::Columns unit[kUnits];
};
constexpr PieceColumns MakePieceColumns() {
  PieceColumns all{};
  for (int i = 0; i < kUnits; ++i) {
    all.unit[i] = crc::MakeColumns((kUnits - 1 - i) * crc::kUnitBytes);
  }
  return all;
}
__device__ const PieceColumns kColumns = MakePieceColumns();

// Loads without allocating in L1: data from host memory is used once and shall not evict other
// lines.
__device__ __forceinline__ uint4 Load(uint64_t address) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}

// Loads a constant that is needed again for each tile. The volatile load keeps the compiler from
// holding the constants in registers, where they would take half of an SM's.
__device__ __forceinline__ uint4 LoadAgain(const uint4* constant) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(constant)
               : "memory");
  return x;
}

// Copies one piece of a tile and returns its raw checksum. A tile is cut into pieces of kUnits
// units. The first piece may be shorter; it is filled up with leading zeros, which change no raw
// checksum. The caller multiplies the checksum of the earlier pieces by the length of a piece.
//
// `from` and `to` are this lane's addresses in the piece's first unit, as if the piece were full.
// Units before `skip` are zeros, and so are this lane's words of unit `skip` unless `whole`.
__device__ __forceinline__ crc::RawChecksum FetchPiece(uint64_t from, uint64_t to, int skip,
                                                       bool whole) {
  uint4 words[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    words[i] = make_uint4(0, 0, 0, 0);
    if (i > skip || (i == skip && whole)) words[i] = Load(from + crc::kUnitBytes * i);
  }
  if (from != to) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i > skip || (i == skip && whole)) {
        *reinterpret_cast<uint4*>(to + crc::kUnitBytes * i) = words[i];
      }
    }
  }
  const uint4* columns = reinterpret_cast<const uint4*>(kColumns.unit[0].word[threadIdx.x % 32]);
  crc::RawChecksum sum;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    sum.Add(words[i], LoadAgain(columns + 64 * i), LoadAgain(columns + 64 * i + 1));
  }
  return sum;
}

__device__ __forceinline__ uint32_t ResultOf(const crc::RawChecksum& sum) {
  const uint4* constants = reinterpret_cast<const uint4*>(crc::kRows.word[threadIdx.x % 32]);
  uint4 rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rows[i] = LoadAgain(constants + i);
  return sum.Result(rows);
}

// One warp copies and verifies one tile at a time. Tiles of one layer come before those of the
// next, so that the first layer is complete first.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    FetchKernel(const __grid_constant__ FetchParams p, uint32_t units, uint32_t zeros_checksum,
                uint32_t piece_factor) {
  const uint32_t per_page = p.tiles_per_layer, per_layer = p.pages * per_page;
  const uint32_t tiles = per_layer * (p.layer_end - p.layer_begin);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t missing = units * crc::kUnitBytes - static_cast<uint32_t>(p.tile_bytes);
  const uint32_t lane_factor = units > kUnits ? crc::LaneFactor(piece_factor) : 0;
  const int first_skip = kUnits - 1 - static_cast<int>((units - 1) % kUnits);
  const uint32_t step = gridDim.x * kWarps;
  for (uint32_t index = blockIdx.x * kWarps + threadIdx.x / 32; index < tiles; index += step) {
    const uint32_t layer = p.layer_begin + index / per_layer;
    const uint32_t page = index % per_layer / per_page, i = index % per_page;
    const uint32_t expected = p.checksums[layer * p.checksums_layer_stride + page * per_page + i];
    const int64_t place =
        static_cast<int64_t>(i * p.tile_bytes) + 16 * lane - missing - crc::kUnitBytes * first_skip;
    uint64_t to = p.to[page] + layer * p.to_layer_stride + place;
    uint64_t from =
        p.from == nullptr ? to : p.from[page] + layer * p.from_layer_stride[page] + place;
    uint32_t sum = ResultOf(FetchPiece(from, to, first_skip, 16 * lane >= missing));
    for (uint32_t done = kUnits - first_skip; done < units; done += kUnits) {
      from += crc::kUnitBytes * kUnits;
      to += crc::kUnitBytes * kUnits;
      sum = ResultOf(FetchPiece(from, to, 0, true)) ^ crc::Multiply(sum, lane_factor);
    }
    if ((sum ^ zeros_checksum) != expected && lane == 0) p.status[page] = 1;
  }
}

}  // namespace

cudaError_t FetchTiles(const FetchParams& p, cudaStream_t stream) {
  if (p.tile_bytes == 0 || p.tile_bytes % 16 != 0 || p.tile_bytes > kTileBytesMax || p.pages < 0 ||
      p.tiles_per_layer < 1 || p.layer_begin < 0 || p.layer_end < p.layer_begin || p.blocks < 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t tiles =
      static_cast<int64_t>(p.pages) * p.tiles_per_layer * (p.layer_end - p.layer_begin);
  if (tiles == 0) return cudaSuccess;
  if (tiles > kTilesMax) return cudaErrorInvalidValue;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const int most = p.blocks > 0 ? p.blocks : kBlocksPerProcessor * processors;
  const auto blocks = static_cast<int>(std::min<int64_t>(most, (tiles + kWarps - 1) / kWarps));
  const auto units = static_cast<uint32_t>((p.tile_bytes + crc::kUnitBytes - 1) / crc::kUnitBytes);
  FetchKernel<<<blocks, kThreads, 0, stream>>>(p, units, crc::ChecksumOfZeros(p.tile_bytes),
                                               crc::PowerOfX(8 * crc::kUnitBytes * kUnits));
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
