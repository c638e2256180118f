// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/pages/fetch_call.h"

// Brings page tiles from scattered places of pinned host memory into slots and checks their CRC-32C
// on the way, in registers. docs/kernels/fetch.md.
namespace crumb::kernels::cuda {

// Enqueues one kernel: no allocation, no synchronisation, can be captured. Tiles that differ are
// stored all the same. cudaErrorInvalidValue: sizes not supported.
cudaError_t FetchTiles(const FetchParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
