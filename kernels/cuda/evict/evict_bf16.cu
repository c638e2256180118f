// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict/evict_bf16.h"

#include "kernels/cuda/common/crc32c.cuh"
#include "kernels/cuda/common/window_tokens.cuh"

namespace crumb::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kExponents = 0x7f807f80;

// Of a pair.
__device__ __forceinline__ bool NotFinite(uint32_t pair) {
  return __vcmpeq2(pair & kExponents, kExponents) != 0;
}

// One block a tile: each warp copies an equal part of it, a unit of the sum at a time.
__global__ void __launch_bounds__(kThreads)
    EvictBf16Kernel(const __grid_constant__ EvictParams p, uint32_t unit_power, uint32_t part_power,
                    uint32_t sum_of_zeros) {
  __shared__ uint32_t sums[kWarps];
  const int window = blockIdx.y, layer = blockIdx.x / p.kv_heads, head = blockIdx.x % p.kv_heads;
  if (window >= *p.windows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_bytes = 2 * p.tile.head_dim, half_bytes = kPageRows * row_bytes;
  const int units = 2 * half_bytes / (crc::kUnitBytes * kWarps);
  const uint64_t from =
      p.ring_address[window] + layer * p.ring_layer_stride + head * p.ring_head_stride;
  const uint64_t to =
      p.tile_address[window] + layer * p.tile_layer_stride + head * p.tile_head_stride;
  const int ring_begin = p.ring_begin[window];
  const uint32_t unit_factor = crc::LaneFactor(unit_power);
  uint32_t sum = 0;
  bool bad = false;
#pragma unroll 4
  for (int unit = 0; unit < units; ++unit) {
    const int at = (warp * units + unit) * crc::kUnitBytes + 16 * lane;
    const bool value = at >= half_bytes;
    const int in_half = at - (value ? half_bytes : 0);
    const int slot = (ring_begin + in_half / row_bytes) % p.ring_capacity;
    const uint4 words = *reinterpret_cast<const uint4*>(
        from + slot * p.ring_token_stride + (value ? p.ring_v_offset : 0) + in_half % row_bytes);
    *reinterpret_cast<uint4*>(to + at) = words;
    bad |= NotFinite(words.x) || NotFinite(words.y) || NotFinite(words.z) || NotFinite(words.w);
    sum = crc::SumOfUnit(words) ^ crc::Multiply(sum, unit_factor);
  }
  if (lane == 0) sums[warp] = sum;
  const bool any_bad = __syncthreads_or(bad) != 0;
  if (warp != 0) return;
  if (any_bad && p.status != nullptr && lane == 0) {
    atomicOr(p.status + window, kStatusNonFinite);
  }
  if (p.sums == nullptr) return;
  const uint32_t part_factor = crc::LaneFactor(part_power);
  uint32_t whole = sums[0];
  for (int i = 1; i < kWarps; ++i) whole = sums[i] ^ crc::Multiply(whole, part_factor);
  if (lane == 0) {
    p.sums[(static_cast<int64_t>(window) * p.layers + layer) * p.kv_heads + head] =
        whole ^ sum_of_zeros;
  }
}

}  // namespace

cudaError_t EvictBf16Windows(const EvictParams& p, cudaStream_t stream) {
  const size_t tile_bytes = p.tile.bf16_bytes();
  if (tile_bytes % (crc::kUnitBytes * kWarps) != 0) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(p.layers * p.kv_heads),
                  static_cast<unsigned>(p.windows_max));
  EvictBf16Kernel<<<grid, kThreads, 0, stream>>>(p, crc::PowerOfX(8 * crc::kUnitBytes),
                                                 crc::PowerOfX(8 * (tile_bytes / kWarps)),
                                                 crc::SumOfZeros(tile_bytes));
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
