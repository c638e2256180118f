// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict/evict.h"

#include "kernels/cuda/common/crc32c.cuh"
#include "kernels/cuda/evict/evict_bf16.h"
#include "kernels/cuda/evict/launch.cuh"

namespace crumb::kernels::cuda {
namespace {

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

cudaError_t EvictWindows(const EvictParams& p, cudaStream_t stream, const EvictTuning& tuning) {
  const bool int2 = p.format == PageFormat::kInt2;
  if (!EvictSupported(p.tile) || (int2 && p.sums != nullptr && p.workspace == nullptr)) {
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
  k.zeros_sum = crc::SumOfZeros(p.tile.int2_bytes());
  k.bulk = tuning.path == RotatePath::kAuto && limits.major >= 9;
  const EvictDevice has = {limits.processors, limits.shared_bytes, k.bulk && limits.major == 9};
  return LauncherOf(p.tile, p.method == Method::kCrumb)(k, has, stream);
}

}  // namespace crumb::kernels::cuda
