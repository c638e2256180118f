// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/evict/evict_call.h"

// Evicted windows of BF16 history: rows of recent rings -> BF16 page tiles, as they are.
namespace crumb::kernels::cuda {

// EvictWindows of params.format kBf16, which calls it.
cudaError_t EvictBf16Windows(const EvictParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
