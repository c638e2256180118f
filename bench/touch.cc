// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/touch.h"

#include <cstring>

namespace crumb::bench {

uint64_t TouchBytes(std::span<const std::byte> bytes) {
  // Independent sums, so that additions do not wait for each other.
  constexpr size_t kLanes = 16;
  uint64_t sums[kLanes] = {};
  size_t at = 0;
  for (; at + sizeof(sums) <= bytes.size(); at += sizeof(sums)) {
    uint64_t words[kLanes];
    std::memcpy(words, bytes.data() + at, sizeof(words));
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += words[lane];
  }
  uint64_t sum = 0;
  for (const uint64_t lane : sums) sum += lane;
  for (; at < bytes.size(); ++at) sum += static_cast<uint64_t>(bytes[at]);
  return sum;
}

}  // namespace crumb::bench
