// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict.h"

#include "kernels/cuda/evict_bf16.h"
#include "kernels/cuda/evict_kernel.cuh"

namespace crumb::kernels::cuda {
namespace {

TilePowers PowersOf(const TileShape& tile) {
  TilePowers powers{};
  const size_t bytes = tile.int2_bytes(), group_bytes = 4 * static_cast<size_t>(tile.head_dim);
  const size_t codes = tile.code_bytes(), meta = tile.meta_bytes();
  const auto power = [&](size_t end) { return crc::PowerOfX(8 * (bytes - end)); };
  for (size_t value = 0; value < 2; ++value) {
    for (size_t group = 0; group < kTeamWarps; ++group) {
      const size_t end = value * codes + (group + 1) * group_bytes;
      const bool two_units = group_bytes > crc::kUnitBytes;
      powers.codes[value][group][0] = power(two_units ? end - crc::kUnitBytes : end);
      powers.codes[value][group][1] = power(end);
    }
    const size_t end = 2 * codes + (value + 1) * meta;
    const size_t units = (meta + crc::kUnitBytes - 1) / crc::kUnitBytes;
    for (size_t unit = 0; unit < units; ++unit) {
      powers.meta[value][unit] = power(end - (units - 1 - unit) * crc::kUnitBytes);
    }
  }
  powers.zeros = crc::SumOfZeros(bytes);
  return powers;
}

EvictLauncher LauncherOf(const TileShape& tile, bool feedback) {
  if (tile.head_dim == 64) return EvictDim64(tile.group_size, feedback);
  if (tile.head_dim == 128) return EvictDim128(tile.group_size, feedback);
  return EvictDim256(tile.group_size, feedback);
}

}  // namespace

bool EvictSupported(const TileShape& tile) { return tile.Valid() && tile.tokens == kWindowTokens; }

size_t EvictWorkspaceBytes(int windows_max, int layers, int kv_heads) {
  return 8 * static_cast<size_t>(windows_max) * layers * kv_heads;
}

cudaError_t EvictWindows(const EvictParams& p, cudaStream_t stream) {
  const bool int2 = p.format == PageFormat::kInt2;
  if (!EvictSupported(p.tile) || (int2 && p.sums != nullptr && p.workspace == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (p.windows_max < 1) return cudaSuccess;
  if (!int2) return EvictBf16Windows(p, stream);
  int device = 0, major = 0;
  EvictDevice has{};
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  get(&has.processors, cudaDevAttrMultiProcessorCount);
  get(&has.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(&major, cudaDevAttrComputeCapabilityMajor);
  if (error != cudaSuccess) return error;
  EvictKernelParams k{};
  k.p = p;
  k.p.overlap_previous = p.overlap_previous && major >= 9;
  k.clip[0] = GuessClip(p.k.clip, p.tile.head_dim);
  k.clip[1] = GuessClip(p.v.clip, p.tile.head_dim);
  if (p.sums != nullptr) k.powers = PowersOf(p.tile);
  k.bulk = p.path == RotatePath::kAuto && major >= 9;
  has.team_products = k.bulk && major == 9;
  return LauncherOf(p.tile, p.method == Method::kCrumb)(k, has, stream);
}

}  // namespace crumb::kernels::cuda
