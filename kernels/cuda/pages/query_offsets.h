// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/pages/query_offsets_call.h"

// q . mu_k of every query row: what centring took out of the stored keys, as decode and prefill
// attention take it in `offset`.
namespace crumb::kernels::cuda {

// Enqueues one kernel: no allocation, no synchronisation, can be captured. cudaErrorInvalidValue:
// sizes not supported.
cudaError_t QueryOffsets(const QueryOffsetsParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
