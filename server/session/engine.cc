// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/engine.h"

#include <algorithm>

namespace crumb::server {

uint64_t Engine::TakeBudget(uint64_t wanted) {
  MutexLock lock(&mutex_);
  if (ended_ || leases_.size() + acquiring_ >= leases_max_) return 0;
  const uint64_t taken = std::min(wanted, pages_max_ - pages_);
  if (taken == 0) return 0;
  pages_ += taken;
  ++acquiring_;
  return taken;
}

bool Engine::AddLease(storage::LeaseId lease, uint64_t pages, uint64_t taken) {
  MutexLock lock(&mutex_);
  --acquiring_;
  if (lease == 0 || ended_) {
    pages_ -= taken;
    return lease == 0;
  }
  pages_ -= taken - pages;
  leases_.emplace(lease, pages);
  return true;
}

bool Engine::RemoveLease(storage::LeaseId lease) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return false;
  pages_ -= found->second;
  leases_.erase(found);
  return true;
}

std::vector<storage::LeaseId> Engine::End() {
  MutexLock lock(&mutex_);
  ended_ = true;
  std::vector<storage::LeaseId> leases;
  for (const auto& [lease, pages] : leases_) {
    leases.push_back(lease);
    pages_ -= pages;
  }
  leases_.clear();
  return leases;
}

size_t Engine::leases() const {
  MutexLock lock(&mutex_);
  return leases_.size();
}

uint64_t Engine::pages() const {
  MutexLock lock(&mutex_);
  return pages_;
}

}  // namespace crumb::server
