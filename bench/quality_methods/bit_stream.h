// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/fp16.h"

// Codes of a few bits and halves, one behind the other, lowest bit first.
namespace crumb::bench {

class BitWriter {
 public:
  void Add(uint32_t value, int bits) {
    for (int i = 0; i < bits; ++i) {
      if (used_ % 8 == 0) bytes_.push_back(0);
      bytes_.back() |= static_cast<uint8_t>((value >> i & 1) << (used_ % 8));
      ++used_;
    }
  }
  // Adds the nearest half and returns what a reader will see.
  float AddHalf(float value) {
    bool saturated = false;
    const uint16_t half = kernels::Fp16FromFloat(value, &saturated);
    Add(half, 16);
    return kernels::Fp16ToFloat(half);
  }
  std::vector<uint8_t> Take() { return std::move(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
  size_t used_ = 0;
};

// Must not be read beyond its end.
class BitReader {
 public:
  explicit BitReader(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}
  uint32_t Next(int bits) {
    uint32_t value = 0;
    for (int i = 0; i < bits; ++i, ++at_) {
      value |= static_cast<uint32_t>(bytes_[at_ / 8] >> (at_ % 8) & 1) << i;
    }
    return value;
  }
  float NextHalf() { return kernels::Fp16ToFloat(static_cast<uint16_t>(Next(16))); }

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_ = 0;
};

}  // namespace crumb::bench
