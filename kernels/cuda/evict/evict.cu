// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict/evict.h"

#include "kernels/cuda/common/crc32c.cuh"
#include "kernels/cuda/common/page_layout.cuh"
#include "kernels/cuda/evict/kernel_layout.cuh"

namespace crumb::kernels::cuda {
namespace {

// --- BF16 history: rows are copied to page tiles unchanged -------------------------------------

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kExponents = 0x7f807f80;

// Returns whether one of two bf16 values is infinite or NaN.
__device__ __forceinline__ bool NotFinite(uint32_t pair) {
  return __vcmpeq2(pair & kExponents, kExponents) != 0;
}

// A block copies one tile, each warp an equal part of it, one unit of the checksum at a time.
__global__ void __launch_bounds__(kThreads)
    EvictBf16Kernel(const __grid_constant__ EvictParams p, uint32_t unit_power, uint32_t part_power,
                    uint32_t zeros_checksum) {
  __shared__ uint32_t checksums[kWarps];
  const int window = blockIdx.y, layer = blockIdx.x / p.kv_heads, head = blockIdx.x % p.kv_heads;
  if (window >= *p.windows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_bytes = 2 * p.tile.head_dim, half_bytes = kPageRows * row_bytes;
  const int units = 2 * half_bytes / (crc::kUnitBytes * kWarps);
  const uint64_t from =
      p.ring_address[window] + layer * p.ring_layer_stride + head * p.ring_head_stride;
  const uint64_t to = p.tile_base + p.tile_address[window] + layer * p.tile_layer_stride +
                      head * p.tile_head_stride;
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
    sum = crc::RawChecksumOfUnit(words) ^ crc::Multiply(sum, unit_factor);
  }
  if (lane == 0) checksums[warp] = sum;
  const bool any_bad = __syncthreads_or(bad) != 0;
  if (warp != 0) return;
  if (any_bad && p.status != nullptr && lane == 0) {
    atomicOr(p.status + window, kStatusNonFinite);
  }
  if (p.checksums == nullptr) return;
  const uint32_t part_factor = crc::LaneFactor(part_power);
  uint32_t whole = checksums[0];
  for (int i = 1; i < kWarps; ++i) whole = checksums[i] ^ crc::Multiply(whole, part_factor);
  if (lane == 0) {
    p.checksums[(static_cast<int64_t>(window) * p.layers + layer) * p.kv_heads + head] =
        whole ^ zeros_checksum;
  }
}

cudaError_t EvictBf16Windows(const EvictParams& p, cudaStream_t stream) {
  const size_t tile_bytes = p.tile.bf16_bytes();
  if (tile_bytes % (crc::kUnitBytes * kWarps) != 0) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(p.layers * p.kv_heads),
                  static_cast<unsigned>(p.windows_max));
  EvictBf16Kernel<<<grid, kThreads, 0, stream>>>(p, crc::PowerOfX(8 * crc::kUnitBytes),
                                                 crc::PowerOfX(8 * (tile_bytes / kWarps)),
                                                 crc::ChecksumOfZeros(tile_bytes));
  return cudaGetLastError();
}

// --- INT2 history ------------------------------------------------------------------------------

template <int dim>
EvictLauncher LauncherOf(int group_size, bool feedback) {
  if constexpr (dim >= 128) {
    if (group_size == 128) return EvictInstance<dim, 128>(feedback);
  }
  return group_size == 64 ? EvictInstance<dim, 64>(feedback) : EvictInstance<dim, 32>(feedback);
}

EvictLauncher LauncherOf(const TileShape& tile, bool feedback) {
  if (tile.head_dim == 64) return LauncherOf<64>(tile.group_size, feedback);
  if (tile.head_dim == 128) return LauncherOf<128>(tile.group_size, feedback);
  return LauncherOf<256>(tile.group_size, feedback);
}

}  // namespace

bool EvictSupported(const TileShape& tile) { return tile.Valid() && tile.tokens == kWindowTokens; }

size_t EvictWorkspaceBytes(int windows_max, int layers, int kv_heads) {
  return 8 * static_cast<size_t>(windows_max) * layers * kv_heads;
}

cudaError_t EvictWindows(const EvictParams& p, cudaStream_t stream, const EvictTuning& tuning) {
  const bool int2 = p.format == PageFormat::kInt2;
  if (!EvictSupported(p.tile) || (int2 && p.checksums != nullptr && p.workspace == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (p.windows_max < 1) return cudaSuccess;
  if (!int2) return EvictBf16Windows(p, stream);
  DeviceLimits limits = tuning.limits;
  const cudaError_t error = CompleteLimits(&limits);
  if (error != cudaSuccess) return error;
  EvictKernelParams k{};
  k.p = p;
  k.p.overlap_previous = p.overlap_previous && limits.major >= 9;
  k.clip[0] = GuessClip(p.k.clip, p.tile.head_dim);
  k.clip[1] = GuessClip(p.v.clip, p.tile.head_dim);
  k.zeros_checksum = crc::ChecksumOfZeros(p.tile.int2_bytes());
  k.bulk = tuning.path == RotatePath::kAuto && limits.major >= 9;
  const EvictDevice has = {limits.processors, limits.shared_bytes, k.bulk && limits.major == 9};
  return LauncherOf(p.tile, p.method == Method::kCrumb)(k, has, stream);
}

}  // namespace crumb::kernels::cuda
