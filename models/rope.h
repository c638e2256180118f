// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "models/config.h"

namespace crumb::models {

// Rotary position embedding over the whole head: channel i and channel i + head_dim / 2 form a pair
// that turns by position * frequency[i]. Immutable, so thread-safe.
class Rope {
 public:
  Rope(const RopeConfig& config, int head_dim);

  // Radians per token, [head_dim / 2].
  const std::vector<float>& frequencies() const { return frequencies_; }

  // cosine, sine [head_dim / 2] at `position`, with the attention factor in them.
  void At(int position, float* cosine, float* sine) const;

 private:
  std::vector<float> frequencies_;
  float factor_;
};

// One line that differs when positions turn differently: for keyspaces and rotation files.
std::string DescribeRope(const RopeConfig& config);

// Turns one head's row [head_dim] in place by what Rope::At gave.
void ApplyRope(const float* cosine, const float* sine, int head_dim, float* row);

}  // namespace crumb::models
