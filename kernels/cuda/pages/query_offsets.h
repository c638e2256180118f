// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/pages/query_offsets_call.h"

// Computes q . mu_k of every query row. Keys are stored without their mean mu_k; decode and prefill
// attention add this term back to the logits (AttentionInputs::offset).
namespace crumb::kernels::cuda {

// Enqueues one kernel. Allocates nothing, does not synchronise and can be captured into a graph.
// Returns cudaErrorInvalidValue if the sizes are not supported.
cudaError_t QueryOffsets(const QueryOffsetsParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
