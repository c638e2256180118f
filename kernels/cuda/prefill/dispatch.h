// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/prefill/prefill_attention.h"

// One source per head_dim holds that size's kernels.
namespace crumb::kernels::cuda::prefill {

template <int dim, int groups>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream,
                          PrefillMma mma);

}  // namespace crumb::kernels::cuda::prefill
