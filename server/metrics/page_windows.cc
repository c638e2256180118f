// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/page_windows.h"

#include <algorithm>
#include <cstring>

namespace crumb::server {
namespace {

// Page keys are SHA-256 digests: any eight bytes are uniform.
uint64_t HashOf(const PageKey& key) {
  uint64_t hash;
  std::memcpy(&hash, key.bytes.data() + key.bytes.size() - sizeof(hash), sizeof(hash));
  return hash;
}

}  // namespace

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
