// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/prefill/prefill_attention.h"

// One source per head_dim holds that size's kernels, another one all of FP16.
namespace crumb::kernels::cuda::prefill {

// Of rows in BF16; LaunchPrefillFp16: in FP16.
template <int dim, int groups>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream);
template <int dim, int groups>
cudaError_t LaunchPrefillFp16(const PrefillAttentionParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda::prefill
