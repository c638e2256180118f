// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/cardinality_sketch.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace crumb::server {
namespace {

// The sums of O. Ertl, "New cardinality estimation algorithms for HyperLogLog sketches" (2017),
// section 2: what registers at 0 and at the largest rank stand for. Both series converge within
// about 60 steps.
double Sigma(double x) {
  double y = 1;
  double z = x;
  for (double before = -1; z != before;) {
    x *= x;
    before = z;
    z += x * y;
    y += y;
  }
  return z;
}

double Tau(double x) {
  if (x == 0 || x == 1) return 0;
  double y = 1;
  double z = 1 - x;
  for (double before = -1; z != before;) {
    x = std::sqrt(x);
    before = z;
    y *= 0.5;
    z -= (1 - x) * (1 - x) * y;
  }
  return z / 3;
}

}  // namespace

void CardinalitySketch::Add(uint64_t hash) {
  const size_t index = hash >> kRankBits;
  // The bit set below ends the count at kRankBits + 1 for a hash of zeros.
  const uint64_t rest = hash << kIndexBits | uint64_t{1} << (kIndexBits - 1);
  const auto rank = static_cast<uint8_t>(std::countl_zero(rest) + 1);
  registers_[index] = std::max(registers_[index], rank);
}

void CardinalitySketch::Merge(const CardinalitySketch& other) {
  for (size_t i = 0; i < kRegisters; ++i) {
    registers_[i] = std::max(registers_[i], other.registers_[i]);
  }
}

void CardinalitySketch::Clear() { std::fill(registers_.begin(), registers_.end(), 0); }

double CardinalitySketch::Estimate() const {
  std::array<uint32_t, kRankBits + 2> counts{};
  for (const uint8_t rank : registers_) ++counts[rank];
  if (counts[0] == kRegisters) return 0;
  constexpr double kCount = kRegisters;
  double z = kCount * Tau(1 - counts[kRankBits + 1] / kCount);
  for (int rank = kRankBits; rank >= 1; --rank) {
    z = 0.5 * (z + counts[static_cast<size_t>(rank)]);
  }
  z += kCount * Sigma(counts[0] / kCount);
  return kCount * kCount / (2 * std::log(2.0) * z);
}

}  // namespace crumb::server
