// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/prefill/prefill_attention.h"

// The launchers of prefill attention. Each is instantiated in the source of its head_dim, so that
// sources compile in parallel.
namespace crumb::kernels::cuda::prefill {

template <int dim, int groups>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream,
                          PrefillMma mma);

}  // namespace crumb::kernels::cuda::prefill
