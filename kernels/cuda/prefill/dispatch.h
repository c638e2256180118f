// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/prefill/prefill_attention.h"

// The launchers of prefill attention. Instances are compiled in generated sources
// (kernels/cuda/CMakeLists.txt).
namespace crumb::kernels::cuda::prefill {

template <int dim, int groups>
cudaError_t LaunchPrefill(const PrefillAttentionParams& params, cudaStream_t stream,
                          PrefillMma mma);

// Launches the wgmma path if the call, the device and the loaded machine code allow it, and returns
// in *launched whether they do.
template <int dim, int groups>
cudaError_t LaunchWgmmaPrefill(const PrefillAttentionParams& params, cudaStream_t stream,
                               bool* launched);

}  // namespace crumb::kernels::cuda::prefill
