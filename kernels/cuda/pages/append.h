// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/pages/append_call.h"

// Writes new K and V rows of one layer into a sequence's sink or recent ring. It serves engines
// whose rows are finished before they are written; an engine with a kernel of its own for QK norm
// and RoPE can write the rows there (models/cuda/layer_kernels.h). All pointers are device
// pointers.
namespace crumb::kernels::cuda {

// Enqueues one kernel. Allocates nothing, does not synchronise and can be captured into a graph.
// Returns cudaErrorInvalidValue if the sizes are not supported.
cudaError_t AppendRows(const AppendParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
