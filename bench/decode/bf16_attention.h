// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/decode/decode_call.h"

// Decode attention over plain BF16 keys and values, one query token a sequence, all sequences of
// one length: what INT2 is held against. docs/decode.md has the comparison with cuDNN.
namespace crumb::bench {

struct Bf16AttentionParams {
  int batch = 1;
  int tokens = 1;  // of every sequence
  int kv_heads = 1;
  int q_heads = 1;                   // at most 16 for each KV head
  int head_dim = 128;                // 128
  const kernels::Bf16* q = nullptr;  // device [batch, q_heads, head_dim]
  kernels::Bf16* out = nullptr;      // device [batch, q_heads, head_dim]
  kernels::cuda::Bf16Rows rows;      // slots 0 to tokens - 1; token_stride 2 * head_dim
  // device, Bf16AttentionWorkspaceBytes; calls that run one after another share it.
  void* workspace = nullptr;
};

size_t Bf16AttentionWorkspaceBytes(int batch, int kv_heads);

// Enqueues two kernels: no allocation, no synchronisation, can be captured. cudaErrorInvalidValue:
// sizes not supported.
cudaError_t Bf16Attention(const Bf16AttentionParams& params, cudaStream_t stream);

}  // namespace crumb::bench
