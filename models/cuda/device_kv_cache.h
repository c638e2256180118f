// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/tile.h"

namespace crumb::models::cuda {

// Where the engine keeps the keys and values of one sequence in device memory: models::KvCache with
// device pointers. A pass is Start, for every layer Append and then Attend, and Advance. All but
// Advance only enqueue on the engine's stream. Not thread-safe.
class DeviceKvCache {
 public:
  virtual ~DeviceKvCache() = default;

  // Tokens whose keys and values are held: the position of the next token.
  virtual int length() const = 0;
  // Most tokens of the next pass; at least 1.
  virtual int pass_tokens_max() const = 0;

  virtual absl::Status Start(int tokens) = 0;
  // k, v device [tokens, kv_heads, head_dim] bf16, after QK-norm and RoPE; Attend of the layer may
  // still read them.
  virtual absl::Status Append(int layer, const kernels::Bf16* k, const kernels::Bf16* v) = 0;
  // Causal attention of the pass's tokens, at scale 1 / sqrt(head_dim).
  // q, out device [tokens, q_heads, head_dim] bf16
  virtual absl::Status Attend(int layer, const kernels::Bf16* q, kernels::Bf16* out) = 0;
  // Ends the pass: `tokens`, as many as Start was told, are now part of the sequence.
  virtual absl::Status Advance(std::span<const int32_t> tokens) = 0;
};

}  // namespace crumb::models::cuda
