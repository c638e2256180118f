// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/rotated_int2.h"

#include <algorithm>
#include <cmath>

namespace crumb::bench {
namespace {

constexpr int kInt2Bits = 2;
constexpr float kRangeMin = 1e-8f;  // OSCAR's floor of a group's range

}  // namespace

Int2Group Int2Group::Of(const Eigen::Ref<const Eigen::RowVectorXf>& values, float clip) {
  std::vector<float> magnitudes(values.size());
  for (size_t i = 0; i < magnitudes.size(); ++i) magnitudes[i] = std::abs(values[i]);
  const auto kept = static_cast<size_t>(clip * static_cast<float>(magnitudes.size()));
  const auto nth = magnitudes.begin() + std::min(kept, magnitudes.size() - 1);
  std::nth_element(magnitudes.begin(), nth, magnitudes.end());
  Int2Group group{.threshold = *nth};
  group.minimum = group.Clipped(values.minCoeff());
  const float range = group.Clipped(values.maxCoeff()) - group.minimum;
  group.step = std::max(range, kRangeMin) / 3.0f;
  return group;
}

float Int2Group::Clipped(float value) const { return std::clamp(value, -threshold, threshold); }

int Int2Group::Code(float value) const {
  const float steps = std::floor((Clipped(value) - minimum) / step + 0.5f);
  return static_cast<int>(std::clamp(steps, 0.0f, 3.0f));
}

std::vector<uint8_t> RotatedInt2::Encode(kernels::TilePart part, const WindowRows& rows) const {
  const Transform& transform = Of(part);
  const WindowRows y = (rows.rowwise() - transform.mean) * transform.rotation;
  const Eigen::Index size = std::min(kInt2Group, y.cols());
  BitWriter out;
  for (Eigen::Index row = 0; row < y.rows(); ++row) {
    for (Eigen::Index begin = 0; begin < y.cols(); begin += size) {
      const auto values = y.row(row).segment(begin, size);
      const Int2Group group = Int2Group::Of(values, transform.clip);
      out.AddHalf(group.step);
      out.AddHalf(group.minimum);
      for (const float value : values) out.Add(static_cast<uint32_t>(group.Code(value)), kInt2Bits);
    }
  }
  return out.Take();
}

WindowRows RotatedInt2::Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                               int tokens) const {
  const Transform& transform = Of(part);
  WindowRows y(tokens, transform.rotation.cols());
  const Eigen::Index size = std::min(kInt2Group, y.cols());
  BitReader in(bytes);
  for (Eigen::Index row = 0; row < y.rows(); ++row) {
    for (Eigen::Index begin = 0; begin < y.cols(); begin += size) {
      Eigen::VectorXf values(size);
      DecodeGroup(kInt2Bits, in, values);
      y.row(row).segment(begin, size) = values.transpose();
    }
  }
  return (y * transform.rotation.transpose()).rowwise() + transform.mean;
}

}  // namespace crumb::bench
