// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/quality_methods/window_codec.h"

namespace crumb::bench {

// 4 bits behind a Hadamard rotation, as QuaRot (Ashkboos et al., 2024, arXiv 2404.00456) does it
// for the KV cache: rows are rotated and rounded to nearest between minimum and maximum per token
// and group of 128 channels, fp16 scale and minimum. 4.25 bits per element at head_dim 128.
class Int4Hadamard : public WindowCodec {
 public:
  explicit Int4Hadamard(int head_dim);  // a power of two
  std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const override;
  WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                    int tokens) const override;

 private:
  const WindowRows hadamard_;  // symmetric, its own inverse
};

}  // namespace crumb::bench
