// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/pages/verify_call.h"

// Checks of page tiles on the GPU: CRC-32C (Castagnoli, initial and final value ~0), the sum that
// fragment headers carry. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Whether tiles of this size can be verified.
bool VerifySupported(size_t tile_bytes);

// Enqueues one kernel: no allocation, no synchronisation, can be captured. Either of `status`
// (with `sums`) and `found` may be asked for alone. cudaErrorInvalidValue: size not supported.
cudaError_t VerifyTiles(const VerifyParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
