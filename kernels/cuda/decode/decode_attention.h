// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/decode/decode_call.h"
#include "kernels/cuda/decode/decode_tuning.h"

// Decode attention of one layer for a batch, on the GPU: BF16 sink, INT2 history pages as they are
// stored, BF16 recent ring. Same definition as kernels/attention.h; docs/kernels/decode.md has the
// schedule. All pointers are device pointers unless said otherwise.
namespace crumb::kernels::cuda {

// Whether the kernels serve these sizes: tiles of 64 tokens, head_dim 64, 128 or 256 with groups of
// 32, 64 or 128 (no wider than head_dim), and columns() up to 32.
bool DecodeSupported(const DecodeShape& shape);

// Bytes of the plan and of the workspace on the current device; 256-byte aligned buffers. Calls
// that run one after another share a workspace; the plan is valid for all layers of a step. Here
// and below: 0 or cudaErrorInvalidValue where the limits, which are the same in all four, leave too
// little shared memory.
size_t DecodePlanBytes(const DecodeShape& shape, const DecodeTuning& tuning = {});
size_t DecodeWorkspaceBytes(const DecodeShape& shape, const DecodeTuning& tuning = {});

// Cuts the batch's tokens into equal shares of bytes, one a block of the attention kernel, or lets
// clusters have them. Once a step, when lengths are final. Enqueues one kernel, or none where that
// needs no plan (DecodeForm); grid and block depend on the shape alone. `plan` is 256-byte aligned.
// cudaErrorInvalidValue: sizes not supported.
cudaError_t PlanDecode(const DecodeShape& shape, const DecodeLengths& lengths, int window,
                       void* plan, cudaStream_t stream, const DecodeTuning& tuning = {});

// Enqueues one kernel for every 16 columns (8 unless head_dim and groups are 128): no allocation,
// no synchronisation, can be captured. The result depends on the inputs and the device's number of
// multiprocessors only. cudaErrorInvalidValue: sizes not supported.
cudaError_t DecodeAttention(const DecodeAttentionParams& params, cudaStream_t stream,
                            const DecodeTuning& tuning = {});

}  // namespace crumb::kernels::cuda
