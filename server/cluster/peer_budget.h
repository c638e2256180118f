// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "common/mutex.h"

namespace crumb::server {

// Bounds how much of one thing each of several parties (nodes, tenants) has at a time, so that one
// of them cannot take all of it. A party has an entry while it holds something. Thread-safe. Unlike
// TenantBudget it has no total: each party has the same maximum.
class PartyBudget {
 public:
  explicit PartyBudget(size_t each_max) : each_max_(each_max) {}

  // An amount that a party holds. The last reference gives it back and may outlive the budget.
  class Hold;
  // Null: `party` would have more than its maximum. An amount above the maximum is never granted; 0
  // always is, and holds nothing.
  std::shared_ptr<const Hold> Take(const std::string& party, size_t amount) {
    if (amount == 0) return std::make_shared<const Hold>(state_, party, amount);
    MutexLock lock(&state_->mutex);
    size_t& held = state_->held[party];
    if (amount > each_max_ - held) {
      if (held == 0) state_->held.erase(party);
      return nullptr;
    }
    held += amount;
    return std::make_shared<const Hold>(state_, party, amount);
  }
  // Returns the amount that the party holds.
  size_t held(const std::string& party) const {
    MutexLock lock(&state_->mutex);
    const auto found = state_->held.find(party);
    return found == state_->held.end() ? 0 : found->second;
  }

 private:
  struct State {
    Mutex mutex;
    std::unordered_map<std::string, size_t> held ABSL_GUARDED_BY(mutex);
  };

  const size_t each_max_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// See PartyBudget::Take.
class PartyBudget::Hold {
 public:
  Hold(std::shared_ptr<State> state, std::string party, size_t amount)
      : state_(std::move(state)), party_(std::move(party)), amount_(amount) {}
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() {
    if (amount_ == 0) return;
    MutexLock lock(&state_->mutex);
    const auto found = state_->held.find(party_);
    found->second -= amount_;
    if (found->second == 0) state_->held.erase(found);
  }

 private:
  const std::shared_ptr<State> state_;
  const std::string party_;
  const size_t amount_;
};

}  // namespace crumb::server
