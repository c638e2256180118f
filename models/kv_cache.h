// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/tile.h"

namespace crumb::models {

// The keys and values of one sequence. In a forward pass, the engine calls Append and then Attend
// for every layer, and Advance once at the end. Not thread-safe.
class KvCache {
 public:
  virtual ~KvCache() = default;

  // The number of tokens whose keys and values are held, which is the position of the next token.
  virtual int length() const = 0;

  // Adds the fresh tokens' rows of one layer, which are copied.
  //   k, v  [tokens, kv_heads, head_dim] after QK-norm and RoPE
  virtual absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                              const kernels::Bf16* v) = 0;

  // Computes causal attention of the fresh tokens over all held tokens, including the fresh ones,
  // with scale 1 / sqrt(head_dim).
  //   q    [tokens, q_heads, head_dim]
  //   out  [tokens, q_heads, head_dim]
  virtual absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) = 0;

  // Ends the forward pass: from now on `tokens` are part of the sequence.
  virtual absl::Status Advance(std::span<const int32_t> tokens) = 0;
};

}  // namespace crumb::models
