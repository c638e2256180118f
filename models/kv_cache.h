// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/tile.h"

namespace crumb::models {

// Where the engine keeps the keys and values of one sequence. The engine calls, for every layer of
// a forward pass, Append and then Attend, and Advance once at the end. Not thread-safe.
class KvCache {
 public:
  virtual ~KvCache() = default;

  // Tokens whose keys and values are held: the position of the next token.
  virtual int length() const = 0;

  // Adds the fresh tokens' rows of one layer. k, v [tokens, kv_heads, head_dim] bf16, after
  // QK-norm and RoPE; not kept by reference.
  virtual absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                              const kernels::Bf16* v) = 0;

  // Causal attention of the fresh tokens over everything held, the fresh ones included, at
  // scale 1 / sqrt(head_dim). q [tokens, q_heads, head_dim] bf16; out [tokens, q_heads, head_dim]
  // f32.
  virtual absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) = 0;

  // Ends the forward pass: `tokens` are now part of the sequence.
  virtual absl::Status Advance(std::span<const int32_t> tokens) = 0;
};

}  // namespace crumb::models
