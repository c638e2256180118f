// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/held_memory.h"

#include <vector>

namespace crumb::server {
namespace {

constexpr char kKey[] = "store.host.bytes_max";

}  // namespace

absl::StatusOr<HeldMemory::Lease> HeldMemory::TakeLease(const std::string& tenant,
                                                        std::span<const PageBytes> pages) {
  auto keys = std::make_unique<std::vector<PageKey>>();
  keys->reserve(pages.size());
  for (const PageBytes& page : pages) keys->push_back(page.key);
  {
    MutexLock lock(&mutex_);
    ExpirePinsLocked();
    Pages& held = tenants_[tenant];
    const uint64_t missing = MissingLocked(held, pages);
    const TenantBudget::Taken taken = budget_.Take(tenant, missing);
    if (taken != TenantBudget::Taken::kYes) {
      if (held.empty()) tenants_.erase(tenant);
      return TenantBudget::Error(taken, kKey);
    }
    uint64_t added = 0;
    for (const PageBytes& page : pages) ++EntryLocked(held, page, added).leases;
    budget_.Give(tenant, missing - added);  // of pages that were named twice
  }
  return Lease(keys.release(), [this, tenant](const void* noted) {
    const std::unique_ptr<const std::vector<PageKey>> ended(
        static_cast<const std::vector<PageKey>*>(noted));
    EndLease(tenant, *ended);
  });
}

absl::Status HeldMemory::Pin(const std::string& tenant, const PageBytes& page, TimePoint until) {
  MutexLock lock(&mutex_);
  ExpirePinsLocked();
  Pages& held = tenants_[tenant];
  const uint64_t missing = MissingLocked(held, {&page, 1});
  const TenantBudget::Taken taken = budget_.Take(tenant, missing);
  if (taken != TenantBudget::Taken::kYes) {
    if (held.empty()) tenants_.erase(tenant);
    return TenantBudget::Error(taken, kKey);
  }
  uint64_t added = 0;
  Page& entry = EntryLocked(held, page, added);
  if (entry.pin != pins_.end()) pins_.erase(entry.pin);
  entry.pin = pins_.emplace(until, std::make_pair(tenant, page.key));
  return absl::OkStatus();
}

void HeldMemory::Unpin(const std::string& tenant, std::span<const PageKey> keys) {
  MutexLock lock(&mutex_);
  for (const PageKey& key : keys) UnpinLocked(tenant, key);
}

void HeldMemory::EndLease(const std::string& tenant, std::span<const PageKey> keys) {
  MutexLock lock(&mutex_);
  const auto held = tenants_.find(tenant);
  if (held == tenants_.end()) return;
  for (const PageKey& key : keys) {
    const auto page = held->second.find(key);
    if (page == held->second.end()) continue;
    --page->second.leases;
    DropIfUnusedLocked(tenant, held->second, page);
  }
  if (held->second.empty()) tenants_.erase(held);
}

void HeldMemory::ExpirePinsLocked() {
  const TimePoint now = clock_.Now();
  while (!pins_.empty() && pins_.begin()->first <= now) {
    const auto [tenant, key] = pins_.begin()->second;
    UnpinLocked(tenant, key);
  }
}

void HeldMemory::UnpinLocked(const std::string& tenant, const PageKey& key) {
  const auto held = tenants_.find(tenant);
  if (held == tenants_.end()) return;
  const auto page = held->second.find(key);
  if (page == held->second.end() || page->second.pin == pins_.end()) return;
  pins_.erase(std::exchange(page->second.pin, pins_.end()));
  DropIfUnusedLocked(tenant, held->second, page);
  if (held->second.empty()) tenants_.erase(held);
}

uint64_t HeldMemory::MissingLocked(const Pages& held, std::span<const PageBytes> pages) const {
  uint64_t missing = 0;
  for (const PageBytes& page : pages) {
    const auto found = held.find(page.key);
    const uint64_t noted = found == held.end() ? 0 : found->second.bytes;
    if (page.bytes > noted) missing += page.bytes - noted;
  }
  return missing;
}

HeldMemory::Page& HeldMemory::EntryLocked(Pages& held, const PageBytes& page, uint64_t& added) {
  const auto [found, fresh] = held.try_emplace(page.key);
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
