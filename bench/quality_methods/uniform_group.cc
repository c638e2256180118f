// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/uniform_group.h"

#include <algorithm>
#include <cmath>

namespace crumb::bench {

void EncodeGroup(const Eigen::Ref<const Eigen::VectorXf>& group, int bits, BitWriter& out) {
  const float most = static_cast<float>((1 << bits) - 1);
  const float scale = out.AddHalf((group.maxCoeff() - group.minCoeff()) / most);
  const float minimum = out.AddHalf(group.minCoeff());
  for (const float value : group) {
    const float steps = scale > 0.0f ? (value - minimum) / scale : 0.0f;
    out.Add(static_cast<uint32_t>(std::clamp(std::round(steps), 0.0f, most)), bits);
  }
}

void DecodeGroup(int bits, BitReader& in, Eigen::Ref<Eigen::VectorXf> group) {
  const float scale = in.NextHalf();
  const float minimum = in.NextHalf();
  for (float& value : group) value = minimum + scale * static_cast<float>(in.Next(bits));
}

}  // namespace crumb::bench
