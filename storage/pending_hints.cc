// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/pending_hints.h"

#include <algorithm>

namespace crumb::storage {
namespace {

// Keys that are noted before the lock is let go.
constexpr size_t kKeysPerHold = 512;

}  // namespace

void PendingHints::Set(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  for (size_t begin = 0; begin < keys.size(); begin += kKeysPerHold) {
    SetPiece(keyspace, keys.subspan(begin, std::min(kKeysPerHold, keys.size() - begin)));
  }
}

void PendingHints::SetPiece(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  for (const PageKey& key : keys) {
    const Name name = {keyspace, key};
    hints_[name] = now + lasts_;
    by_age_.push_back({now + lasts_, name});
  }
  const auto must_go = [&] {
    return !by_age_.empty() && (by_age_.size() > hints_max_ || by_age_.front().until <= now);
  };
  // Each piece forgets more than it can have added, so the rest may wait for the next.
  for (size_t gone = 0; gone < 2 * kKeysPerHold && must_go(); ++gone) {
    const auto found = hints_.find(by_age_.front().name);
    // A hint that was renewed has a younger entry behind.
    if (found != hints_.end() && found->second == by_age_.front().until) hints_.erase(found);
    by_age_.pop_front();
  }
}

bool PendingHints::Has(const KeyspaceId& keyspace, const PageKey& key) const {
  MutexLock lock(&mutex_);
  const auto found = hints_.find(Name{keyspace, key});
  return found != hints_.end() && found->second > clock_.Now();
}

}  // namespace crumb::storage
