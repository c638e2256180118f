// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "models/config.h"

namespace crumb::models {

// Rotary position embedding over the whole head: channels i and i + head_dim / 2 form a pair that
// is rotated by position * frequency[i]. Immutable, so thread-safe.
class Rope {
 public:
  Rope(const RopeConfig& config, int head_dim);

  // The frequencies in radians per token, [head_dim / 2].
  const std::vector<float>& frequencies() const { return frequencies_; }

  // Computes cosine and sine [head_dim / 2] at `position`, multiplied by the attention factor.
  void At(int position, float* cosine, float* sine) const;

 private:
  std::vector<float> frequencies_;
  float factor_;
};

// Returns one line that differs between different embeddings, for keyspaces and rotation files.
std::string DescribeRope(const RopeConfig& config);

// Rotates one head's row [head_dim] in place by cosine and sine from Rope::At.
void ApplyRope(const float* cosine, const float* sine, int head_dim, float* row);

}  // namespace crumb::models
