// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/tile.h"
#include "models/cuda/product_chain.h"
#include "models/cuda/projection_shape.h"

namespace crumb::models::cuda {

// y = scale * x W' for 1 to kFewRows rows of x: reads W once, as a stream. Enqueues one kernel,
// which asks for its first weights while the kernel before it ends: no allocation, no
// synchronisation, can be captured. cudaErrorInvalidValue: sizes not supported.
//   x  device [rows, inputs]
//   w  device [outputs, inputs]
//   y  device [rows, outputs] of shape.output
cudaError_t FewRowsProduct(const ProjectionShape& shape, float scale, const kernels::Bf16* x,
                           const kernels::Bf16* w, void* y, cudaStream_t stream);

}  // namespace crumb::models::cuda
