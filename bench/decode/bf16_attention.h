// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/decode/decode_call.h"

// Decode attention over BF16 keys and values, with which INT2 is compared: one query token per
// sequence, and sequences of one length. docs/decode.md compares it with cuDNN.
namespace crumb::bench {

struct Bf16AttentionParams {
  int batch = 1;
  int tokens = 1;  // tokens of every sequence
  int kv_heads = 1;
  int q_heads = 1;                   // 1 to 16 per KV head
  int head_dim = 128;                // 128
  const kernels::Bf16* q = nullptr;  // device [batch, q_heads, head_dim]
  kernels::Bf16* out = nullptr;      // device [batch, q_heads, head_dim]
  kernels::cuda::Bf16Rows rows;      // slots 0 to tokens - 1; token_stride 2 * head_dim
  // device, Bf16AttentionWorkspaceBytes. Calls that run one after another may share it.
  void* workspace = nullptr;
};

// Returns the bytes of the workspace.
size_t Bf16AttentionWorkspaceBytes(int batch, int kv_heads);

// Enqueues two kernels. It allocates nothing, does not synchronise, and can be captured.
// cudaErrorInvalidValue: the sizes are not supported.
cudaError_t Bf16Attention(const Bf16AttentionParams& params, cudaStream_t stream);

}  // namespace crumb::bench
