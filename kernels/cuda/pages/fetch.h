// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/pages/fetch_call.h"

// Copies page tiles from scattered places of pinned host memory, or of a peer's memory, into slots
// and verifies their CRC-32C in registers on the way; or verifies tiles where they lie
// (docs/kernels/fetch.md).
namespace crumb::kernels::cuda {

// Enqueues one kernel. Allocates nothing, does not synchronise and can be captured into a graph.
// Tiles whose checksum differs are stored all the same and reported in params.status. Returns
// cudaErrorInvalidValue if the sizes are not supported.
cudaError_t FetchTiles(const FetchParams& params, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
