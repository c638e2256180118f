// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/tile.h"

// Arguments of QueryOffsets (pages.h). This header is plain data and needs no CUDA header.
// All pointers are device pointers.
namespace crumb::kernels::cuda {

struct QueryOffsetsParams {
  int tokens = 1;
  int kv_heads = 1;
  int q_heads = 1;  // a multiple of kv_heads; query head h reads KV head h / (q_heads / kv_heads)
  int head_dim = 128;
  int position_blocks = 1;
  const Bf16* q = nullptr;        // [tokens, q_heads, head_dim]
  const float* mean_k = nullptr;  // [kv_heads, head_dim, position_blocks] mu_k
  float* offset = nullptr;        // out [tokens, q_heads, position_blocks]

  // Query rows that are copied for sampling, or null. Of sequence s, whose tokens are [s *
  // held_tokens, (s + 1) * held_tokens), the rows that read KV head held_head[s] - 1 are copied to
  // `held`; 0: none. REQUIRES: at most one sequence has a head other than 0.
  const int32_t* held_head = nullptr;  // [tokens / held_tokens]
  int held_tokens = 1;
  Bf16* held = nullptr;  // out [held_tokens, q_heads / kv_heads, head_dim]
};

}  // namespace crumb::kernels::cuda
