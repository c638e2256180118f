// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/decode/decode_call.h"
#include "kernels/tile.h"

// The kernels of a Qwen3-architecture layer besides its projections and attention: rows of bf16,
// sums in fp32. A row is one token of one sequence. All pointers are device pointers. Every
// function enqueues one kernel, allocates nothing, does not synchronise, and can be captured;
// cudaErrorInvalidValue: the sizes are not supported. A kernel may start while the previous one in
// the stream ends, and waits for it before it reads.
namespace crumb::models::cuda {

using kernels::Bf16;

// REQUIRES: hidden is a multiple of 8, at most 8,192.
struct NormShape {
  int rows = 1;
  int hidden = 0;
  float epsilon = 1e-6f;
};

// residual[row] = table[tokens[row]]; out = RMSNorm(residual) * weight.
//   tokens    [rows]
//   residual  [rows, hidden] written
//   out       [rows, hidden]
cudaError_t EmbedAndNorm(const NormShape& shape, const int32_t* tokens, const Bf16* table,
                         const Bf16* weight, Bf16* residual, Bf16* out, cudaStream_t stream);

// residual += update; out = RMSNorm(residual) * weight.
cudaError_t AddAndNorm(const NormShape& shape, const Bf16* update, const Bf16* weight,
                       Bf16* residual, Bf16* out, cudaStream_t stream);

// Applies RMSNorm (if weights are given) and RoPE to the heads of q and k; writes q to a buffer,
// and k and v to the rows that attention reads.
struct RopeParams {
  int rows = 1;
  int q_heads = 1;
  int kv_heads = 1;
  int head_dim = 128;    // 128
  int rotary_dim = 128;  // rotated channels: 128 or 64; c is paired with c + rotary_dim / 2
  float epsilon = 1e-6f;
  const Bf16* qkv = nullptr;       // [rows, q_heads + 2 kv_heads, head_dim]
  const Bf16* q_weight = nullptr;  // [head_dim], or null: no norm of q and k
  const Bf16* k_weight = nullptr;  // [head_dim]
  const float* cosine = nullptr;   // [rows, rotary_dim / 2]
  const float* sine = nullptr;     // [rows, rotary_dim / 2]
  Bf16* q = nullptr;               // [rows, q_heads, head_dim]
  // Dense rows [rows, kv_heads, head_dim]. Null: k and v are written to `ring`.
  Bf16* k = nullptr;
  Bf16* v = nullptr;
  // Row r goes to slot (begin[r] + tokens[r] - 1) % capacity of ring r.
  kernels::cuda::Bf16Rows ring;
  const int32_t* begin = nullptr;   // [rows]
  const int32_t* tokens = nullptr;  // [rows]
  int capacity = 1;
  // The means whose products q . mean_k attention takes as `offset`; null: they are not computed.
  const float* mean_k = nullptr;  // [kv_heads, head_dim]
  float* offset = nullptr;        // [rows, q_heads]
};
cudaError_t NormRopeAppend(const RopeParams& params, cudaStream_t stream);

// out = SiLU(gate) * up.
//   gate_up  [rows, 2, width]
//   out      [rows, width]; width is a multiple of 8
cudaError_t GateUp(int rows, int width, const Bf16* gate_up, Bf16* out, cudaStream_t stream);

// Finds the index of each row's greatest logit, the lowest one of equal logits.
//   logits  [rows, vocabulary]; vocabulary is a multiple of 8
//   best    [rows] zeroed once when allocated; every call leaves it zeroed
//   done    [rows] zeroed once when allocated; every call leaves it zeroed
//   tokens  [rows] out
cudaError_t GreedyTokens(int rows, int vocabulary, const Bf16* logits, uint64_t* best,
                         uint32_t* done, int32_t* tokens, cudaStream_t stream);

}  // namespace crumb::models::cuda
