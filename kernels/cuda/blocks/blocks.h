// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/blocks/blocks_call.h"

// Attention over an engine's blocks: the tables of a step, and moves of BF16 rows between blocks
// and memory that the other kernels read. Both functions only enqueue, allocate nothing and can be
// captured into a graph; grids depend on the parameters' sizes alone.
namespace crumb::kernels::cuda {

// Enqueues two kernels, which read the engine's tables and the headers of its requests.
cudaError_t PlanBlocks(const PlanBlocksParams& params, cudaStream_t stream);

// Enqueues one kernel.
cudaError_t MoveBlockRows(const MoveBlockRowsParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
