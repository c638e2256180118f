// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/int4_hadamard.h"

#include <algorithm>

#include "bench/quality_methods/uniform_group.h"
#include "calibration/eigenbasis.h"

namespace crumb::bench {
namespace {

constexpr int kBits = 4;
constexpr Eigen::Index kGroup = 128;

}  // namespace

Int4Hadamard::Int4Hadamard(int head_dim)
    : hadamard_(calibration::HadamardMatrix(head_dim).cast<float>()) {}

std::vector<uint8_t> Int4Hadamard::Encode(kernels::TilePart, const WindowRows& rows) const {
  BitWriter out;
  const WindowRows rotated = rows * hadamard_;
  const Eigen::Index group = std::min(kGroup, rotated.cols());
  for (Eigen::Index row = 0; row < rotated.rows(); ++row) {
    for (Eigen::Index begin = 0; begin < rotated.cols(); begin += group) {
      EncodeGroup(rotated.row(row).segment(begin, group).transpose(), kBits, out);
    }
  }
  return out.Take();
}

WindowRows Int4Hadamard::Decode(kernels::TilePart, const std::vector<uint8_t>& bytes,
                                int tokens) const {
  WindowRows rotated(tokens, hadamard_.cols());
  BitReader in(bytes);
  const Eigen::Index group = std::min(kGroup, rotated.cols());
  for (Eigen::Index row = 0; row < rotated.rows(); ++row) {
    for (Eigen::Index begin = 0; begin < rotated.cols(); begin += group) {
      Eigen::VectorXf values(group);
      DecodeGroup(kBits, in, values);
      rotated.row(row).segment(begin, group) = values.transpose();
    }
  }
  return rotated * hadamard_;
}

}  // namespace crumb::bench
