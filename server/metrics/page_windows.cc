// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/page_windows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace crumb::server {
namespace {

// The functions sigma and tau of O. Ertl, "New cardinality estimation algorithms for HyperLogLog
// sketches" (2017), section 2: the contributions of registers at 0 and at the largest rank. Both
// series converge within about 60 steps.
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

// Page keys are SHA-256 digests: any eight bytes are uniform.
uint64_t HashOf(const PageKey& key) {
  uint64_t hash;
  std::memcpy(&hash, key.bytes.data() + key.bytes.size() - sizeof(hash), sizeof(hash));
  return hash;
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

PageWindows::PageWindows(TimePoint start) : start_(start) {
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < kWindows.size(); ++i) rings_[i].parts.resize(kWindows[i].parts);
}

int64_t PageWindows::PartAt(size_t window, TimePoint now) const {
  return std::max<int64_t>(rings_[window].newest, (now - start_) / kWindows[window].part);
}

void PageWindows::Add(std::span<const PageKey> keys, TimePoint now) {
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < kWindows.size(); ++i) {
    Ring& ring = rings_[i];
    ring.newest = PartAt(i, now);
    Part& part = ring.parts[static_cast<size_t>(ring.newest) % ring.parts.size()];
    if (part.number != ring.newest) {
      part.number = ring.newest;
      part.requested = 0;
      part.sketch.Clear();
    }
    part.requested += keys.size();
    for (const PageKey& key : keys) part.sketch.Add(HashOf(key));
  }
}

std::array<PageWindows::Reading, PageWindows::kWindows.size()> PageWindows::Read(
    TimePoint now) const {
  std::array<Reading, kWindows.size()> readings{};
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < kWindows.size(); ++i) {
    const int64_t oldest = PartAt(i, now) - static_cast<int64_t>(kWindows[i].parts) + 1;
    CardinalitySketch all;
    uint64_t requested = 0;
    for (const Part& part : rings_[i].parts) {
      if (part.number < oldest) continue;
      requested += part.requested;
      all.Merge(part.sketch);
    }
    readings[i] = {kWindows[i].name, requested, all.Estimate()};
  }
  return readings;
}

}  // namespace crumb::server
