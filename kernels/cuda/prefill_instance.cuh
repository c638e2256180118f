// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/prefill_dispatch.h"
#include "kernels/cuda/prefill_kernel.cuh"

namespace crumb::kernels::cuda::prefill {

// 32 query rows a warp where registers hold their outputs, else 16.
template <int dim, int groups, bool bulk>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream) {
  constexpr int kColumnTiles = dim <= 128 && groups == 1 ? 4 : 2;
  return Launch<Traits<dim, groups, kColumnTiles, bulk>>(params, stream);
}

#define CRUMB_PREFILL(dim, groups)                                                      \
  template cudaError_t LaunchPrefill<dim, groups, true>(const PrefillAttentionParams&,  \
                                                        cudaStream_t);                  \
  template cudaError_t LaunchPrefill<dim, groups, false>(const PrefillAttentionParams&, \
                                                         cudaStream_t);

}  // namespace crumb::kernels::cuda::prefill
