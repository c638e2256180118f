// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/page_key.h"
#include "common/tenant_budget.h"

namespace crumb::server {

// How much of host memory each tenant keeps from eviction, by leases and by pins together. A page
// that nobody leases and no pin protects can be evicted for a commit of any tenant; without this
// budget one tenant could lease or pin all of host memory, and every other commit would be refused.
//
// A page counts once for its tenant, however many leases and pins it has: sequences that share a
// prefix pay for it once. A page whose copy lies on the SSD counts the same, because its pin keeps
// it there too. Pins count until they expire, are taken back, or their page is deleted.
//
// Used only where tenants are told apart. Thread-safe. Cost: one hash lookup a page.
class HeldMemory {
 public:
  struct PageBytes {
    PageKey key;
    uint64_t bytes = 0;
  };
  // Ends its share of the tenant's leases when it goes. HeldMemory must outlive it.
  using Lease = std::shared_ptr<const void>;

  // `bytes`: of host memory; `clock` must outlive this.
  HeldMemory(uint64_t bytes, int64_t part_max_percent, const Clock& clock)
      : budget_(bytes, part_max_percent), clock_(clock) {}

  // Notes a lease on these pages. kResourceExhausted: the tenant would hold more than its part.
  absl::StatusOr<Lease> TakeLease(const std::string& tenant, std::span<const PageBytes> pages);

  // Notes a pin, which replaces the page's former one. Errors as of TakeLease.
  absl::Status Pin(const std::string& tenant, const PageBytes& page, TimePoint until);
  // The pages are not pinned any more; pages without a pin are skipped.
  void Unpin(const std::string& tenant, std::span<const PageKey> keys);

  uint64_t used() const { return budget_.used(); }
  uint64_t used_by(const std::string& tenant) const { return budget_.used_by(tenant); }

 private:
  // When a pin expires, and whose it is.
  using Pins = std::multimap<TimePoint, std::pair<std::string, PageKey>>;
  struct Page {
    uint64_t bytes = 0;  // as taken from the budget
    uint64_t leases = 0;
    Pins::iterator pin;  // pins_.end(): none
  };
  using Pages = std::unordered_map<PageKey, Page>;

  void EndLease(const std::string& tenant, std::span<const PageKey> keys);
  void ExpirePinsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UnpinLocked(const std::string& tenant, const PageKey& key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the tenant has to take for these pages beyond what it holds.
  uint64_t MissingLocked(const Pages& held, std::span<const PageBytes> pages) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Page& EntryLocked(Pages& held, const PageBytes& page, uint64_t& added)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropIfUnusedLocked(const std::string& tenant, Pages& held, Pages::iterator page)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  TenantBudget budget_;
  const Clock& clock_;
  mutable Mutex mutex_;
  std::unordered_map<std::string, Pages> tenants_ ABSL_GUARDED_BY(mutex_);
  Pins pins_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
