// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/pages/append_call.h"

// New K and V rows of one layer -> sink rows or recent ring, on the GPU. All pointers are device
// pointers.
namespace crumb::kernels::cuda {

// Enqueues one kernel: no allocation, no synchronisation, can be captured. cudaErrorInvalidValue:
// sizes not supported.
cudaError_t AppendRows(const AppendParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
