// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/lease_table.h"

#include <algorithm>
#include <utility>

namespace crumb::storage {

LeaseTable::Lease::~Lease() {
  table.host_.Unref(prefix.host);
  table.devices_.Unref(prefix.device);
}

LeaseId LeaseTable::Add(Prefix&& prefix, TimePoint now) {
  MutexLock lock(&mutex_);
  host_fragments_ += prefix.host_fragments;
  leases_.try_emplace(leases_.end(), ++last_lease_, *this, std::move(prefix), now);
  return last_lease_;
}

std::optional<LeasedPages> LeaseTable::Read(LeaseId lease, const TileRange& range) const {
  const Lease* found = nullptr;
  {
    MutexLock lock(&mutex_);
    const auto entry = leases_.find(lease);
    if (entry == leases_.end()) return std::nullopt;
    found = &entry->second;
    ++found->readers;
  }
  const Prefix& prefix = found->prefix;
  LeasedPages read = {.pages = static_cast<uint32_t>(prefix.pages()),
                      .fragments = host_.FragmentsOf(prefix.host, range)};
  if (!prefix.device.empty()) {
    for (FragmentRef& fragment : read.fragments) fragment.page = prefix.host_index[fragment.page];
    read.device_fragments = devices_.FragmentsOf(prefix.device, range);
  }
  EndRead(lease, *found);
  return read;
}

LeaseTable::Leases::node_type LeaseTable::EndRead(LeaseId lease, const Lease& read) const {
  MutexLock lock(&mutex_);
  if (--read.readers > 0) return {};
  return ended_.extract(lease);
}

bool LeaseTable::Release(LeaseId lease) {
  Leases::node_type ended;
  MutexLock lock(&mutex_);
  ended = leases_.extract(lease);
  if (ended.empty()) return false;
  host_fragments_ -= ended.mapped().prefix.host_fragments;
  if (ended.mapped().readers > 0) ended_.insert(std::move(ended));
  return true;
}

void LeaseTable::AddStats(StoreStats& stats) const {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  stats.leases = leases_.size();
  stats.leased_slots = host_fragments_;
  if (leases_.empty()) return;
  const Duration age = now - leases_.begin()->second.since;
  stats.oldest_lease_seconds = std::max(0.0, std::chrono::duration<double>(age).count());
}

}  // namespace crumb::storage
