// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/quality_methods/window_codec.h"

namespace crumb::bench {

// KIVI (Liu et al., 2024, arXiv 2402.02750) at 2 bits with groups of 64: keys are quantized per
// channel over 64 tokens, values per token over 64 channels, round to nearest between minimum and
// maximum, fp16 scale and minimum. 2.5 bits per element. No rotation, no calibration.
class Kivi : public WindowCodec {
 public:
  explicit Kivi(int head_dim) : head_dim_(head_dim) {}
  std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const override;
  WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                    int tokens) const override;

 private:
  const int head_dim_;
};

}  // namespace crumb::bench
