// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/evict/kernel.cuh"

// Launch configuration of the kernel of kernel.cuh: the number of blocks, the warpgroups per block,
// and how blocks divide the windows.
namespace crumb::kernels::cuda {

// Rounds per block from which windows themselves are divided over all SMs.
inline constexpr int kManyRounds = 8;

// Enqueues `kernel`; with overlap_previous as a programmatic dependent launch.
inline cudaError_t LaunchBlocks(void (*kernel)(EvictKernelParams), int blocks, int threads,
                                int bytes, const EvictKernelParams& k, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = k.p.overlap_previous ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, k);
}

template <int dim, int group_size, bool kFeedback>
cudaError_t LaunchEvict(EvictKernelParams k, const EvictDevice& device, cudaStream_t stream) {
  using T = RowTraits<dim, group_size>;
  using Layout = EvictLayout<T, kFeedback>;
  int warpgroups = Layout::kWarpgroups;
  const bool checksums = k.p.checksums != nullptr;
  k.streamed = Layout::Bytes(false, 1, checksums) > device.shared_bytes;
  // a warpgroup that repeats a window would keep the others waiting for parts of R
  if (k.streamed && kFeedback) warpgroups = 1;
  while (warpgroups > 0 && Layout::Bytes(k.streamed, warpgroups, checksums) > device.shared_bytes)
    --warpgroups;
  if (warpgroups == 0) return cudaErrorInvalidConfiguration;
  const int matrices = 2 * k.p.layers * k.p.kv_heads;
  const int blocks_per_matrix = std::min(device.processors / matrices, k.p.windows_max);
  // The number of warpgroups is reduced as far as the number of rounds stays the same, so that none
  // idles in the last round.
  const int windows = blocks_per_matrix > 1
                          ? (k.p.windows_max + blocks_per_matrix - 1) / blocks_per_matrix
                          : k.p.windows_max;
  const int rounds = (windows + warpgroups - 1) / warpgroups;
  warpgroups = (windows + rounds - 1) / rounds;
  // If blocks go from matrix to matrix, two blocks of half the size run per SM: one computes
  // while the other waits for R.
  constexpr int kReserved = 1024;  // shared memory that the driver reserves per block
  const bool halves =
      Layout::kWarpgroups == 4 && !kFeedback && matrices > device.processors &&
      2 * (Layout::Bytes(k.streamed, 2, checksums) + kReserved) <= device.shared_bytes + kReserved;
  if (halves) warpgroups = std::min(warpgroups, 2);
  const int bytes = Layout::Bytes(k.streamed, warpgroups, checksums);
  auto kernel = EvictKernel<T, kFeedback, RotateMma::kWarp>;
  if constexpr (dim <= 128) {
    const bool rotated = k.p.k.rotation != nullptr && k.p.v.rotation != nullptr;
    if (device.has_wgmma && !k.streamed && rotated) {
      kernel = EvictKernel<T, kFeedback, RotateMma::kWgmma>;
    }
  }
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  // With many windows every SM takes part, so the matrix that a block begins with depends on their
  // number.
  k.windows_apart = blocks_per_matrix > 1 && windows >= kManyRounds * warpgroups;
  k.blocks_per_matrix = k.windows_apart ? 1 : std::max(1, blocks_per_matrix);
  const int blocks = k.blocks_per_matrix > 1
                         ? blocks_per_matrix * matrices
                         : static_cast<int>(std::min<int64_t>(
                               device.processors * (halves ? 2 : 1),
                               int64_t{matrices} * ((windows + warpgroups - 1) / warpgroups)));
  return LaunchBlocks(kernel, blocks, warpgroups * kWarpgroupThreads, bytes, k, stream);
}

template <int dim, int group_size>
EvictLauncher EvictInstance(bool feedback) {
  return feedback ? LaunchEvict<dim, group_size, true> : LaunchEvict<dim, group_size, false>;
}

// Instantiates one instance, within the namespace of this file: CMakeLists.txt lists them.
#define CRUMB_EVICT(dim, group_size) template EvictLauncher EvictInstance<dim, group_size>(bool);

}  // namespace crumb::kernels::cuda
