// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/prefill/prefill_call.h"
#include "kernels/cuda/prefill/prefill_tuning.h"

// Prefill attention of one layer on the GPU: chunks of fresh tokens attend the BF16 sink, INT2
// history pages as they are stored, BF16 history pages, the BF16 recent ring and the fresh tokens
// themselves, causally. The definition is that of kernels/attention.h, where fresh tokens are the
// newest recent ones; docs/kernels/prefill.md describes the schedule. All pointers are device
// pointers.
namespace crumb::kernels::cuda {

// Returns whether the kernels support these sizes. They need tiles of 64 tokens.
bool PrefillSupported(const PrefillShape& shape);

// Enqueues one kernel. Allocates nothing, does not synchronise and can be captured into a graph.
// The output depends on the inputs only. Returns cudaErrorInvalidValue if the sizes are not
// supported.
cudaError_t PrefillAttention(const PrefillAttentionParams& params, cudaStream_t stream,
                             PrefillMma mma = PrefillMma::kAuto);

}  // namespace crumb::kernels::cuda
