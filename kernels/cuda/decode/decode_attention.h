// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/decode/decode_call.h"
#include "kernels/cuda/decode/decode_tuning.h"

// Decode attention of one layer for a batch of sequences on the GPU: one or a few query tokens per
// sequence attend the BF16 sink, INT2 history pages as they are stored, BF16 history pages and the
// BF16 recent ring. The definition is that of kernels/attention.h; docs/kernels/decode.md describes
// the schedules. All pointers are device pointers unless a comment says otherwise.
//
// Order of calls: once per step PlanDecode, when lengths are final; then DecodeAttention once per
// layer. `tuning` must be the same in all calls.
namespace crumb::kernels::cuda {

// Returns whether the kernels support these sizes: tiles of 64 tokens, head_dim 64, 128 or 256 with
// groups of 32, 64 or 128 (no wider than head_dim), and at most 64 query rows per KV head.
bool DecodeSupported(const DecodeShape& shape);

// Bytes of the plan and of the workspace on the current device. Both buffers are 256-byte aligned.
// A plan is valid for all layers of its step; calls that run one after another share a workspace.
// Return 0 if the sizes are not supported or tuning.limits leave too little shared memory.
size_t DecodePlanBytes(const DecodeShape& shape, const DecodeTuning& tuning = {});
size_t DecodeWorkspaceBytes(const DecodeShape& shape, const DecodeTuning& tuning = {});

// Plans a step: cuts the batch's tokens into work ranges of equal bytes, one for each worker of the
// attention kernel, or gives them to clusters. Enqueues one kernel, or none if the schedule needs
// no plan (DecodeForm); grid and block depend on the shape alone. Returns cudaErrorInvalidValue if
// the sizes are not supported or shared memory is too small. `window` is AttentionInputs::window.
cudaError_t PlanDecode(const DecodeShape& shape, const DecodeLengths& lengths, int window,
                       void* plan, cudaStream_t stream, const DecodeTuning& tuning = {});

// Enqueues one kernel per 16 query rows of a KV head (per 8 unless head_dim and groups are 128).
// Allocates nothing, does not synchronise and can be captured into a graph. The output depends only
// on the inputs and on the device's number of SMs. Returns cudaErrorInvalidValue if the sizes are
// not supported or shared memory is too small.
cudaError_t DecodeAttention(const DecodeAttentionParams& params, cudaStream_t stream,
                            const DecodeTuning& tuning = {});

}  // namespace crumb::kernels::cuda
