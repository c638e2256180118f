// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/pending_hints.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace crumb::storage {
namespace {

// Keys that are noted before the lock is let go.
constexpr size_t kKeysPerHold = 512;

}  // namespace

void PendingHints::Set(const KeyspaceId& keyspace, const std::string& tenant,
                       std::span<const PageKey> keys) {
  for (size_t begin = 0; begin < keys.size(); begin += kKeysPerHold) {
    SetPiece(keyspace, tenant, keys.subspan(begin, std::min(kKeysPerHold, keys.size() - begin)));
  }
}

void PendingHints::SetPiece(const KeyspaceId& keyspace, const std::string& tenant,
                            std::span<const PageKey> keys) {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  Tenants::value_type& own = *tenants_.try_emplace(tenant).first;
  for (const PageKey& key : keys) {
    const Name name = {keyspace, key};
    until_[name] = now + lasts_;
    hints_.push_back({now + lasts_, name, &own});
    own.second.push_back(std::prev(hints_.end()));
  }
  // Each piece takes out more than it can have added, so the rest may wait for the next.
  const size_t ended = EndOld(now, 2 * kKeysPerHold);
  Shorten(2 * kKeysPerHold - ended);
}

size_t PendingHints::EndOld(TimePoint now, size_t most) {
  size_t ended = 0;
  for (; ended < most && !hints_.empty() && hints_.front().until <= now; ++ended) {
    Tenants::value_type& tenant = *hints_.front().tenant;
    PopOldest(tenant.second);
    if (tenant.second.empty()) tenants_.erase(tenants_.find(tenant.first));
  }
  return ended;
}

void PendingHints::Shorten(size_t most) {
  if (hints_.size() <= hints_max_) return;
  std::vector<Tenants::value_type*> heap;  // the tenant with most hints first
  heap.reserve(tenants_.size());
  for (Tenants::value_type& tenant : tenants_) heap.push_back(&tenant);
  const auto fewer = [](const Tenants::value_type* a, const Tenants::value_type* b) {
    return a->second.size() < b->second.size();
  };
  std::make_heap(heap.begin(), heap.end(), fewer);
  for (size_t taken = 0; taken < most && hints_.size() > hints_max_; ++taken) {
    std::pop_heap(heap.begin(), heap.end(), fewer);
    Tenants::value_type& tenant = *heap.back();
    if (PopOldest(tenant.second)) forgotten_.Add();
    if (tenant.second.empty()) {
      heap.pop_back();
      tenants_.erase(tenants_.find(tenant.first));
    } else {
      std::push_heap(heap.begin(), heap.end(), fewer);
    }
  }
}

bool PendingHints::PopOldest(Queue& queue) {
  const Hints::iterator oldest = queue.front();
  const auto found = until_.find(oldest->name);
  const bool last = found != until_.end() && found->second == oldest->until;
  if (last) until_.erase(found);
  hints_.erase(oldest);
  queue.pop_front();
  return last;
}

bool PendingHints::Has(const KeyspaceId& keyspace, const PageKey& key) const {
  MutexLock lock(&mutex_);
  const auto found = until_.find(Name{keyspace, key});
  return found != until_.end() && found->second > clock_.Now();
}

}  // namespace crumb::storage
