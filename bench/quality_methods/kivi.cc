// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/kivi.h"

#include <algorithm>

#include "bench/quality_methods/uniform_group.h"

namespace crumb::bench {
namespace {

constexpr int kBits = 2;
constexpr int kGroup = 64;

// Calls visit(line, begin, count) for every group: a line is a channel of K, a token of V.
template <typename Visit>
void ForGroups(kernels::TilePart part, int tokens, int dim, const Visit& visit) {
  const bool keys = part == kernels::TilePart::kKey;
  const int lines = keys ? dim : tokens, length = keys ? tokens : dim;
  for (int line = 0; line < lines; ++line) {
    for (int begin = 0; begin < length; begin += kGroup) {
      visit(line, begin, std::min(kGroup, length - begin));
    }
  }
}

}  // namespace

std::vector<uint8_t> Kivi::Encode(kernels::TilePart part, const WindowRows& rows) const {
  BitWriter out;
  const int tokens = static_cast<int>(rows.rows());
  ForGroups(part, tokens, head_dim_, [&](int line, int begin, int count) {
    Eigen::VectorXf group(count);
    if (part == kernels::TilePart::kKey) {
      group = rows.col(line).segment(begin, count);
    } else {
      group = rows.row(line).segment(begin, count).transpose();
    }
    EncodeGroup(group, kBits, out);
  });
  return out.Take();
}

WindowRows Kivi::Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                        int tokens) const {
  WindowRows rows(tokens, head_dim_);
  BitReader in(bytes);
  ForGroups(part, tokens, head_dim_, [&](int line, int begin, int count) {
    Eigen::VectorXf group(count);
    DecodeGroup(kBits, in, group);
    if (part == kernels::TilePart::kKey) {
      rows.col(line).segment(begin, count) = group;
    } else {
      rows.row(line).segment(begin, count) = group.transpose();
    }
  });
  return rows;
}

}  // namespace crumb::bench
