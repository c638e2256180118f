// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/prefill/prefill_call.h"
#include "kernels/cuda/prefill/prefill_tuning.h"

// Attention of one layer for chunks of fresh tokens, on the GPU: BF16 sink, INT2 history pages as
// they are stored, BF16 recent ring, and the fresh tokens themselves, causally. Same definition as
// kernels/attention.h, where fresh tokens are the newest recent ones; docs/kernels/prefill.md has
// the schedule. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Whether the kernel serves these sizes: tiles of 64 tokens.
bool PrefillSupported(const PrefillShape& shape);

// Enqueues one kernel: no allocation, no synchronisation, can be captured. The result depends on
// the inputs only. cudaErrorInvalidValue: sizes not supported.
cudaError_t PrefillAttention(const PrefillAttentionParams& params, cudaStream_t stream,
                             PrefillMma mma = PrefillMma::kAuto);

}  // namespace crumb::kernels::cuda
