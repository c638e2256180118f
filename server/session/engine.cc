// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/engine.h"

#include <algorithm>
#include <utility>

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

bool Engine::AddLease(storage::LeaseId lease, uint64_t pages, uint64_t taken,
                      const RandomId& session, std::shared_ptr<const void> held_budget) {
  MutexLock lock(&mutex_);
  --acquiring_;
  if (lease == 0 || ended_) {
    pages_ -= taken;
    return lease == 0;
  }
  pages_ -= taken - pages;
  Held held;
  held.pages = pages;
  held.acquirer = session.slot();
  held.held = std::move(held_budget);
  leases_.emplace(lease, std::move(held));
  return true;
}

bool Engine::JoinLease(storage::LeaseId lease) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return false;
  ++found->second.joined;
  return true;
}

Engine::Removal Engine::RemoveLease(storage::LeaseId lease, Hold hold, const RandomId& session,
                                    std::shared_ptr<const void>* left) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return Removal::kUnknown;
  Held& held = found->second;
  if (hold == Hold::kJoined) {
    if (held.joined == 0) return Removal::kUnknown;
    --held.joined;
    if (session.slot() != held.acquirer) held.left.insert(session.slot());
  } else if (held.left.contains(session.slot()) || !std::exchange(held.acquired, false)) {
    return Removal::kUnknown;
  }
  if (held.acquired || held.joined > 0) return Removal::kHeldByOthers;
  pages_ -= found->second.pages;
  *left = std::move(held.held);
  leases_.erase(found);
  return Removal::kLast;
}

void Engine::DropAcquiredBy(const RandomId& session, Ended* ended) {
  MutexLock lock(&mutex_);
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    Held& held = lease->second;
    if (held.acquirer == session.slot()) held.acquired = false;
    if (held.acquired || held.joined > 0) {
      ++lease;
      continue;
    }
    ended->leases.push_back(lease->first);
    ended->held.push_back(std::move(held.held));
    pages_ -= held.pages;
    lease = leases_.erase(lease);
  }
}

void Engine::End(Ended* ended) {
  MutexLock lock(&mutex_);
  ended_ = true;
  for (auto& [lease, held] : leases_) {
    ended->leases.push_back(lease);
    ended->held.push_back(std::move(held.held));
    pages_ -= held.pages;
  }
  leases_.clear();
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
