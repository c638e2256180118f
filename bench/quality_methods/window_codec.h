// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <cstdint>
#include <vector>

#include "kernels/tile_codec.h"

namespace crumb::bench {

// Rows [tokens, head_dim] of one KV head.
using WindowRows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// A published KV cache quantizer, for comparison: what a window of 64 tokens becomes when it leaves
// the recent window. Everything that decoding needs beyond the method's own constants is in the
// bytes, so that their number is what the method stores. Written for clarity, not for speed.
// Immutable, so thread-safe.
class WindowCodec {
 public:
  virtual ~WindowCodec() = default;
  // Keys are as the model attends them: after QK-norm and RoPE.
  virtual std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const = 0;
  // `tokens` rows from the bytes that Encode made of as many.
  virtual WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                            int tokens) const = 0;
};

}  // namespace crumb::bench
