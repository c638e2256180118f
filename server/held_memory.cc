// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/held_memory.h"

#include <vector>

#include "common/status_macros.h"

namespace crumb::server {
namespace {

constexpr char kKey[] = "store.host.bytes_max";
// Expired pins that every call ends, and that one hold of the lock ends for a call that needs their
// room: some 20 and 150 us.
constexpr size_t kExpiredPerCall = 64;
constexpr size_t kExpiredPerHold = 512;

}  // namespace

absl::Status HeldMemory::TakeRoom(const std::string& tenant, const KeyspaceId& keyspace,
                                  std::span<const PageBytes> pages,
                                  const std::function<uint64_t(Pages& held)>& note) {
  size_t expire = kExpiredPerCall;
  while (true) {
    MutexLock lock(&mutex_);
    const size_t expired = ExpirePinsLocked(expire);
    Pages& held = tenants_[tenant];
    const uint64_t missing = MissingLocked(held, keyspace, pages);
    const TenantBudget::Taken taken = budget_.Take(tenant, missing);
    if (taken == TenantBudget::Taken::kYes) {
      budget_.Give(tenant, missing - note(held));  // of pages that were named twice
      return absl::OkStatus();
    }
    if (held.empty()) tenants_.erase(tenant);
    if (expired < expire) return TenantBudget::Error(taken, kKey);
    expire = kExpiredPerHold;
  }
}

absl::StatusOr<HeldMemory::Lease> HeldMemory::TakeLease(const std::string& tenant,
                                                        const KeyspaceId& keyspace,
                                                        std::span<const PageBytes> pages) {
  auto keys = std::make_unique<std::vector<PageKey>>();
  keys->reserve(pages.size());
  for (const PageBytes& page : pages) keys->push_back(page.key);
  CRUMB_RETURN_IF_ERROR(TakeRoom(tenant, keyspace, pages, [&](Pages& held) {
    mutex_.AssertHeld();
    uint64_t added = 0;
    for (const PageBytes& page : pages) ++EntryLocked(held, keyspace, page, added).leases;
    return added;
  }));
  return Lease(keys.release(), [this, tenant, keyspace](const void* noted) {
    const std::unique_ptr<const std::vector<PageKey>> ended(
        static_cast<const std::vector<PageKey>*>(noted));
    EndLease(tenant, keyspace, *ended);
  });
}

absl::Status HeldMemory::Pin(const std::string& tenant, const KeyspaceId& keyspace,
                             const PageBytes& page, TimePoint until,
                             const std::function<bool()>& pin) {
  const PageName name = {keyspace, page.key};
  MutexLock order(&OrderOf(name));
  CRUMB_RETURN_IF_ERROR(TakeRoom(tenant, keyspace, {&page, 1}, [&](Pages& held) {
    mutex_.AssertHeld();
    uint64_t added = 0;
    Page& entry = EntryLocked(held, keyspace, page, added);
    if (entry.pin != pins_.end()) pins_.erase(entry.pin);
    entry.pin = pins_.emplace(until, std::make_pair(tenant, name));
    pin_count_.store(pins_.size());
    return added;
  }));
  if (pin()) return absl::OkStatus();
  MutexLock lock(&mutex_);
  UnpinLocked(tenant, name);
  return absl::OkStatus();
}

void HeldMemory::Unpin(const std::string& tenant, const KeyspaceId& keyspace, const PageKey& key,
                       const std::function<void()>& unpin) {
  const PageName name = {keyspace, key};
  MutexLock order(&OrderOf(name));
  unpin();
  MutexLock lock(&mutex_);
  UnpinLocked(tenant, name);
}

void HeldMemory::ForgetRemoved(const std::string& tenant, const KeyspaceId& keyspace,
                               const PageKey& key, const std::function<bool()>& is_there) {
  const PageName name = {keyspace, key};
  MutexLock order(&OrderOf(name));
  if (is_there()) return;
  MutexLock lock(&mutex_);
  UnpinLocked(tenant, name);
}

void HeldMemory::EndLease(const std::string& tenant, const KeyspaceId& keyspace,
                          std::span<const PageKey> keys) {
  MutexLock lock(&mutex_);
  const auto held = tenants_.find(tenant);
  if (held == tenants_.end()) return;
  for (const PageKey& key : keys) {
    const auto page = held->second.find({keyspace, key});
    if (page == held->second.end()) continue;
    --page->second.leases;
    DropIfUnusedLocked(tenant, held->second, page);
  }
  if (held->second.empty()) tenants_.erase(held);
}

size_t HeldMemory::ExpirePinsLocked(size_t count) {
  const TimePoint now = clock_.Now();
  size_t ended = 0;
  for (; ended < count && !pins_.empty() && pins_.begin()->first <= now; ++ended) {
    const auto [tenant, name] = pins_.begin()->second;
    UnpinLocked(tenant, name);
  }
  return ended;
}

void HeldMemory::UnpinLocked(const std::string& tenant, const PageName& name) {
  const auto held = tenants_.find(tenant);
  if (held == tenants_.end()) return;
  const auto page = held->second.find(name);
  if (page == held->second.end() || page->second.pin == pins_.end()) return;
  pins_.erase(std::exchange(page->second.pin, pins_.end()));
  pin_count_.store(pins_.size());
  DropIfUnusedLocked(tenant, held->second, page);
  if (held->second.empty()) tenants_.erase(held);
}

uint64_t HeldMemory::MissingLocked(const Pages& held, const KeyspaceId& keyspace,
                                   std::span<const PageBytes> pages) const {
  uint64_t missing = 0;
  for (const PageBytes& page : pages) {
    const auto found = held.find({keyspace, page.key});
    const uint64_t noted = found == held.end() ? 0 : found->second.bytes;
    if (page.bytes > noted) missing += page.bytes - noted;
  }
  return missing;
}

HeldMemory::Page& HeldMemory::EntryLocked(Pages& held, const KeyspaceId& keyspace,
                                          const PageBytes& page, uint64_t& added) {
  const auto [found, fresh] = held.try_emplace({keyspace, page.key});
  if (fresh) found->second.pin = pins_.end();
  if (page.bytes > found->second.bytes) {
    added += page.bytes - found->second.bytes;
    found->second.bytes = page.bytes;
  }
  return found->second;
}

void HeldMemory::DropIfUnusedLocked(const std::string& tenant, Pages& held, Pages::iterator page) {
  if (page->second.leases > 0 || page->second.pin != pins_.end()) return;
  budget_.Give(tenant, page->second.bytes);
  held.erase(page);
}

}  // namespace crumb::server
