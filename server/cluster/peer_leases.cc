// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/peer_leases.h"

#include <utility>

namespace crumb::server {

PeerLeases::~PeerLeases() {
  std::unordered_map<uint64_t, Entry> entries;
  {
    MutexLock lock(&mutex_);
    entries.swap(entries_);
  }
  for (const auto& [id, entry] : entries) ReleaseInStore(entry.leases);
}

uint64_t PeerLeases::Add(const std::string& node, std::vector<storage::LeaseId> leases) {
  const TimePoint until = clock_.Now() + lasts_;
  {
    MutexLock lock(&mutex_);
    if (entries_.size() < leases_max_) {
      entries_[++last_] = {node, std::move(leases), until};
      return last_;
    }
  }
  ReleaseInStore(leases);
  return 0;
}

void PeerLeases::Release(const std::string& node, uint64_t lease) {
  std::vector<storage::LeaseId> ended;
  {
    MutexLock lock(&mutex_);
    const auto found = entries_.find(lease);
    if (found == entries_.end() || found->second.node != node) return;
    ended = std::move(found->second.leases);
    entries_.erase(found);
  }
  ReleaseInStore(ended);
}

size_t PeerLeases::Reap() {
  const TimePoint now = clock_.Now();
  std::vector<storage::LeaseId> ended;
  size_t count = 0;
  {
    MutexLock lock(&mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      if (entry->second.until > now) {
        ++entry;
        continue;
      }
      ended.insert(ended.end(), entry->second.leases.begin(), entry->second.leases.end());
      entry = entries_.erase(entry);
      ++count;
    }
  }
  ReleaseInStore(ended);
  return count;
}

size_t PeerLeases::size() const {
  MutexLock lock(&mutex_);
  return entries_.size();
}

void PeerLeases::ReleaseInStore(const std::vector<storage::LeaseId>& leases) {
  for (const storage::LeaseId lease : leases) store_.Release(lease);
}

}  // namespace crumb::server
