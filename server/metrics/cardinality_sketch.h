// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crumb::server {

// How many distinct values were added, estimated in 8 KiB: HyperLogLog with 2^13 registers,
// standard error 1.15 %. Not thread-safe.
class CardinalitySketch {
 public:
  CardinalitySketch() : registers_(kRegisters, 0) {}

  // `hash` is uniform over 64 bits and the same for equal values.
  void Add(uint64_t hash);
  // As if what was added to `other` had been added here.
  void Merge(const CardinalitySketch& other);
  void Clear();
  double Estimate() const;

 private:
  static constexpr int kIndexBits = 13;
  static constexpr int kRankBits = 64 - kIndexBits;
  static constexpr size_t kRegisters = size_t{1} << kIndexBits;

  std::vector<uint8_t> registers_;  // each the largest rank seen, at most kRankBits + 1
};

}  // namespace crumb::server
