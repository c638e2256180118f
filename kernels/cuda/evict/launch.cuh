// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/evict/kernel.cuh"

// How many blocks of how many teams a launch of the kernel in evict_kernel.cuh has, and how they
// share the windows.
namespace crumb::kernels::cuda {

// What a device has.
struct EvictDevice {
  int processors;
  int shared_bytes;  // of a block at most
  bool team_products;
};

template <int dim, int group_size, bool kFeedback>
cudaError_t LaunchEvict(EvictKernelParams k, const EvictDevice& device, cudaStream_t stream) {
  using T = RowTraits<dim, group_size>;
  using Layout = EvictLayout<T, kFeedback>;
  int teams = Layout::kTeams;
  const bool sums = k.p.sums != nullptr;
  k.streamed = Layout::Bytes(false, 1, sums) > device.shared_bytes;
  if (k.streamed && kFeedback) teams = 1;  // who goes again would leave the others waiting
  while (teams > 0 && Layout::Bytes(k.streamed, teams, sums) > device.shared_bytes) --teams;
  if (teams == 0) return cudaErrorInvalidConfiguration;
  const int matrices = 2 * k.p.layers * k.p.kv_heads;
  const int sharers = std::min(device.processors / matrices, k.p.windows_max);
  // As many rounds through a block's windows of a matrix, with no team waiting in the last one.
  const int share = sharers > 1 ? (k.p.windows_max + sharers - 1) / sharers : k.p.windows_max;
  const int rounds = (share + teams - 1) / teams;
  teams = (share + rounds - 1) / rounds;
  // Where blocks go from matrix to matrix, two of half the size a multiprocessor: one computes
  // while the other waits for R.
  constexpr int kManyRounds = 8;
  constexpr int kReserved = 1024;  // of a block, beside its own shared memory
  const bool halves =
      Layout::kTeams == 4 && !kFeedback && matrices > device.processors &&
      2 * (Layout::Bytes(k.streamed, 2, sums) + kReserved) <= device.shared_bytes + kReserved;
  if (halves) teams = std::min(teams, 2);
  const int bytes = Layout::Bytes(k.streamed, teams, sums);
  auto kernel = EvictKernel<T, kFeedback, Products::kByWarp>;
  if constexpr (dim <= 128) {
    const bool rotated = k.p.k.rotation != nullptr && k.p.v.rotation != nullptr;
    if (device.team_products && !k.streamed && rotated) {
      kernel = EvictKernel<T, kFeedback, Products::kByTeam>;
    }
  }
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  // With many windows all multiprocessors take part, and which matrix a block begins with depends
  // on their number.
  k.windows_apart = sharers > 1 && share >= kManyRounds * teams;
  k.sharers = k.windows_apart ? 1 : std::max(1, sharers);
  const int blocks =
      k.sharers > 1
          ? sharers * matrices
          : static_cast<int>(std::min<int64_t>(device.processors * (halves ? 2 : 1),
                                               int64_t{matrices} * ((share + teams - 1) / teams)));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(teams * kTeamThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = k.p.overlap_previous ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, k);
}

using EvictLauncher = cudaError_t (*)(EvictKernelParams, const EvictDevice&, cudaStream_t);

// Per head_dim; null: no such group size.
EvictLauncher EvictDim64(int group_size, bool feedback);
EvictLauncher EvictDim128(int group_size, bool feedback);
EvictLauncher EvictDim256(int group_size, bool feedback);

}  // namespace crumb::kernels::cuda
