// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/prefill_dispatch.h"
#include "kernels/cuda/prefill_kernel.cuh"

namespace crumb::kernels::cuda::prefill {

// 32 query rows a warp where registers hold their outputs, else 16.
template <int dim, int groups>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream) {
  constexpr int kColumnTiles = dim <= 128 && groups == 1 ? 4 : 2;
  return Launch<Traits<dim, groups, kColumnTiles>>(params, stream);
}

#define CRUMB_PREFILL(dim, groups) \
  template cudaError_t LaunchPrefill<dim, groups>(const PrefillAttentionParams&, cudaStream_t);

}  // namespace crumb::kernels::cuda::prefill
