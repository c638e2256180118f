// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/prefill/dispatch.h"
#include "kernels/cuda/prefill/kernel.cuh"

namespace crumb::kernels::cuda::prefill {

// A warp's products: 32 query rows where registers hold their outputs, else 16.
template <int dim, int groups>
inline constexpr int kWarpColumnTiles = dim <= 128 && groups == 1 ? 4 : 2;

template <int dim, int groups>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream,
                          PrefillMma mma) {
  if constexpr (dim == 128 && groups <= 2) {
    if (mma == PrefillMma::kAuto && params.soft_cap <= 0.0f && params.window <= 0) {
      using T = Traits<dim, groups, 4>;
      bool team = false;
      const cudaError_t error = RunsTeams<T>(&team);
      if (error != cudaSuccess) return error;
      if (team) return LaunchTeam<T>(params, stream);
    }
  }
  return Launch<Traits<dim, groups, kWarpColumnTiles<dim, groups>>>(params, stream);
}

#define CRUMB_PREFILL(dim, groups)                                                             \
  template cudaError_t LaunchPrefill<dim, groups>(const PrefillAttentionParams&, cudaStream_t, \
                                                  PrefillMma);

}  // namespace crumb::kernels::cuda::prefill
