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

uint64_t PeerLeases::Add(const std::string& node, std::vector<storage::LeaseId> leases,
                         size_t pages) {
  const TimePoint until = clock_.Now() + lasts_;
  {
    MutexLock lock(&mutex_);
    const auto found = held_.find(node);
    const Held held = found == held_.end() ? Held() : found->second;
    if (entries_.size() < bounds_.leases_max && held.leases < bounds_.leases_per_node_max &&
        held.pages + pages <= bounds_.pages_per_node_max) {
      entries_[++last_] = {node, std::move(leases), pages, until};
      held_[node] = {held.leases + 1, held.pages + pages};
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
    GiveBack(found->second);
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
      GiveBack(entry->second);
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

void PeerLeases::GiveBack(const Entry& entry) {
  Held& held = held_[entry.node];
  --held.leases;
  held.pages -= entry.pages;
  if (held.leases == 0) held_.erase(entry.node);
}

void PeerLeases::ReleaseInStore(const std::vector<storage::LeaseId>& leases) {
  for (const storage::LeaseId lease : leases) store_.Release(lease);
}

}  // namespace crumb::server
