// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "calibration/rotary.h"
#include "kernels/tile.h"

namespace crumb::calibration {

// The least number of calibration tokens per channel, so that covariances have full rank.
inline constexpr int kTokensPerDimension = 4;
// Bounds of the sizes that files of others may name.
inline constexpr int kLayersMax = 1024;
inline constexpr int64_t kHeadDimMax = 1024;

// The geometry of the model that produced activations.
struct ModelShape {
  std::string name;
  std::string rope;  // a description of the position embedding, for messages and digests
  int layers = 0;
  int q_heads = 0;  // a multiple of kv_heads
  int kv_heads = 0;
  int head_dim = 0;
  RotaryPairs rotary;
  std::vector<int> layer_ids = {};  // the model's numbers of the layers; empty: 0, 1, 2...

  int LayerId(int layer) const { return layer_ids.empty() ? layer : layer_ids[layer]; }
};

// One layer's activations of one sequence, at consecutive positions, after RoPE. Valid during the
// call of the visitor.
struct SequenceActivations {
  int layer = 0;  // 0 to layers - 1
  int tokens = 0;
  int first_position = 0;
  const kernels::Bf16* q = nullptr;  // [tokens, q_heads, head_dim]
  const kernels::Bf16* k = nullptr;  // [tokens, kv_heads, head_dim]
  const kernels::Bf16* v = nullptr;  // [tokens, kv_heads, head_dim]
};

// A source of queries, keys and values for calibration.
class ActivationSource {
 public:
  using Visitor = std::function<absl::Status(const SequenceActivations&)>;

  virtual ~ActivationSource() = default;
  virtual const ModelShape& shape() const = 0;
  // The number of layers that one walk should cover: all of them if a walk costs the same for any
  // number; otherwise few, because calibration holds the statistics of as many layers.
  virtual int layers_per_walk() const = 0;
  // Returns how often a walk over all layers calls the visitor.
  virtual int64_t visits() const = 0;
  // Calls `visit` for layers [first, first + count) of every sequence, one after the other, with
  // the same activations in every walk. An error of the visitor ends the walk and is returned.
  virtual absl::Status ForEach(int first, int count, const Visitor& visit) = 0;
};

}  // namespace crumb::calibration
