// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

#include "kernels/cpu/scratch.h"

// The online softmax of one row over one piece of the sequence. Logits are in base 2.
namespace crumb::kernels {

inline constexpr float kLog2E = 1.44269504088896341f;

// The map from a raw score to a base-2 logit.
struct LogitMap {
  float scale = 1.0f;
  float soft_cap = 0.0f;
  float offset = 0.0f;  // added to the raw score before scaling
  float shift = 0.0f;   // nats that are subtracted at the end
};

// Returns cap * tanh(x / cap), computed from the exponential of -2 |x| / cap.
template <typename V>
typename V::F SoftCap(typename V::F x, float cap) {
  const typename V::F one = V::Set(1.0f);
  const typename V::F magnitude = V::Abs(x);
  const typename V::F e = V::Exp2(V::Mul(magnitude, V::Set(-2.0f * kLog2E / cap)));
  const typename V::F t = V::Div(V::Sub(one, e), V::Add(one, e));
  const typename V::F capped = V::Mul(t, V::Set(cap));
  const typename V::I sign = V::AndI(V::AsInt(x), V::SetI(static_cast<int32_t>(0x80000000u)));
  return V::AsFloat(V::AddI(V::AsInt(capped), sign));
}

// Maps `count` raw scores in place. REQUIRES: `count` is a multiple of 16.
template <typename V>
void MapLogits(const LogitMap& map, int count, float* scores) {
  if (map.soft_cap > 0.0f) {
    for (int t = 0; t < count; t += V::kLanes) {
      const typename V::F x =
          V::Mul(V::Add(V::Load(scores + t), V::Set(map.offset)), V::Set(map.scale));
      const typename V::F capped = V::Sub(SoftCap<V>(x, map.soft_cap), V::Set(map.shift));
      V::Store(scores + t, V::Mul(capped, V::Set(kLog2E)));
    }
    return;
  }
  const typename V::F multiplier = V::Set(map.scale * kLog2E);
  const typename V::F addend = V::Set((map.offset * map.scale - map.shift) * kLog2E);
  for (int t = 0; t < count; t += V::kLanes) {
    V::Store(scores + t, V::Fma(V::Load(scores + t), multiplier, addend));
  }
}

// Replaces `count` logits by 2^(logit - running max) and adds them to row `row` of `partial`.
// Returns the factor by which earlier sums have to be rescaled. REQUIRES: `count` is a multiple of
// 16.
template <typename V>
float AddToSoftmax(const PartialSoftmax& partial, int row, int count, float* scores) {
  typename V::F highest = V::Load(scores);
  for (int t = V::kLanes; t < count; t += V::kLanes) {
    highest = V::Max(highest, V::Load(scores + t));
  }
  const float piece = V::ReduceMax(highest);
  float rescale = 1.0f;
  if (piece > partial.running_max[row]) {
    rescale = std::exp2(partial.running_max[row] - piece);
    partial.running_max[row] = piece;
  }
  // Without a finite logit, differences to the maximum are undefined and the weights are zero.
  const bool empty = partial.running_max[row] == -std::numeric_limits<float>::infinity();
  const typename V::F maximum = V::Set(empty ? 0.0f : partial.running_max[row]);
  typename V::F sum = V::Set(0.0f);
  for (int t = 0; t < count; t += V::kLanes) {
    const typename V::F p = V::Exp2(V::Sub(V::Load(scores + t), maximum));
    V::Store(scores + t, p);
    sum = V::Add(sum, p);
  }
  partial.sum[row] = partial.sum[row] * rescale + V::ReduceAdd(sum);
  return rescale;
}

}  // namespace crumb::kernels
