// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <cstdint>
#include <utility>
#include <vector>

#include "bench/quality_methods/window_codecs.h"

namespace crumb::bench {

// Channels of a quantization group, or all of a head with fewer.
inline constexpr Eigen::Index kInt2Group = 128;

// How OSCAR stores a group of channels: values are clipped at an order statistic of their
// magnitudes and rounded to the nearest of four levels between the clipped minimum and maximum.
struct Int2Group {
  float threshold = 0.0f;  // the largest magnitude after clipping
  float minimum = 0.0f;
  float step = 0.0f;  // above 0

  // REQUIRES: `clip` is in (0, 1].
  static Int2Group Of(const Eigen::Ref<const Eigen::RowVectorXf>& values, float clip);
  float Clipped(float value) const;
  int Code(float value) const;  // 0 to 3
};

// Two-bit codes behind a rotation R and in front of it the subtraction of a mean, of one (layer, KV
// head): y = (x - mean) R. fp16 step and minimum per token and group of 128 channels, 2.25 bits per
// element at head_dim 128.
class RotatedInt2 : public WindowCodec {
 public:
  struct Transform {
    WindowRows rotation;
    Eigen::RowVectorXf mean;
    float clip = 0.0f;
  };

  RotatedInt2(Transform k, Transform v) : k_(std::move(k)), v_(std::move(v)) {}
  const Transform& Of(kernels::TilePart part) const {
    return part == kernels::TilePart::kKey ? k_ : v_;
  }
  std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const override;
  WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                    int tokens) const override;

 private:
  const Transform k_, v_;
};

}  // namespace crumb::bench
