// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "calibration/rotary.h"
#include "kernels/tile.h"

namespace crumb::calibration {

// The model that activations come from.
struct ModelShape {
  std::string name;
  std::string rope;  // the effective position embedding, for people and digests
  int layers = 0;
  int q_heads = 0;  // a multiple of kv_heads
  int kv_heads = 0;
  int head_dim = 0;
  RotaryPairs rotary;
};

// One layer's activations of one sequence, positions 0 to tokens - 1, after RoPE. Borrowed.
struct SequenceActivations {
  int layer = 0;
  int tokens = 0;
  const kernels::Bf16* q = nullptr;  // [tokens, q_heads, head_dim]
  const kernels::Bf16* k = nullptr;  // [tokens, kv_heads, head_dim]
  const kernels::Bf16* v = nullptr;  // the same
};

// Where calibration gets queries, keys and values from.
class ActivationSource {
 public:
  using Visitor = std::function<absl::Status(const SequenceActivations&)>;

  virtual ~ActivationSource() = default;
  virtual const ModelShape& shape() const = 0;
  // Calls `visit` for every layer of every sequence, one at a time, the same each time it is
  // called. An error of the visitor ends the walk and is passed on.
  virtual absl::Status ForEach(const Visitor& visit) = 0;
};

}  // namespace crumb::calibration
