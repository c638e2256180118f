// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
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
// without leases and pins can be evicted for a commit of any tenant; without this budget one tenant
// could lease or pin all of host memory, and every other commit would be refused.
//
// A page counts once for its tenant, however many leases and pins it has: sequences that share a
// prefix pay for it once. A page whose copy lies on the SSD counts the same, because its pin keeps
// it there too. Pins count until they expire, are taken back, or their page leaves all tiers.
//
// Invariant: a page that is pinned in the store counts here. Pins change in two places, the store
// and this budget, so both are changed with the page's OrderOf lock held.
//
// Used only where tenants are told apart. Thread-safe. Cost: one hash lookup a page, and the end of
// a bounded number of expired pins a hold of the lock.
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
  absl::StatusOr<Lease> TakeLease(const std::string& tenant, const KeyspaceId& keyspace,
                                  std::span<const PageBytes> pages);

  // Notes a pin, which replaces the page's former one, and calls `pin`, which pins the page in the
  // store and returns false if it has left; then the note is taken back. Errors as of TakeLease,
  // and `pin` was not called.
  absl::Status Pin(const std::string& tenant, const KeyspaceId& keyspace, const PageBytes& page,
                   TimePoint until, const std::function<bool()>& pin);
  // Calls `unpin`, which unpins the page in the store, and forgets the pin if there is one.
  void Unpin(const std::string& tenant, const KeyspaceId& keyspace, const PageKey& key,
             const std::function<void()>& unpin);
  // Forgets the pin of a page that left a tier, if `is_there` says that it is in none.
  void ForgetRemoved(const std::string& tenant, const KeyspaceId& keyspace, const PageKey& key,
                     const std::function<bool()>& is_there);
  // False: there is no pin to forget.
  bool has_pins() const { return pin_count_.load() > 0; }

  uint64_t used() const { return budget_.used(); }
  uint64_t used_by(const std::string& tenant) const { return budget_.used_by(tenant); }

 private:
  using PageName = std::pair<KeyspaceId, PageKey>;
  struct HashOf {
    size_t operator()(const PageName& name) const {
      return std::hash<PageKey>()(name.second) * 31 + std::hash<KeyspaceId>()(name.first);
    }
  };
  // When a pin expires, and the tenant and page that it is of.
  using Pins = std::multimap<TimePoint, std::pair<std::string, PageName>>;
  struct Page {
    uint64_t bytes = 0;  // as taken from the budget
    uint64_t leases = 0;
    Pins::iterator pin;  // pins_.end(): none
  };
  using Pages = std::unordered_map<PageName, Page, HashOf>;
  static constexpr size_t kOrders = 64;

  Mutex& OrderOf(const PageName& name) { return orders_[HashOf()(name) % kOrders]; }
  // Takes what the pages need beyond what the tenant holds. While it is refused and there are
  // expired pins, these end piece by piece, between which other callers get the lock.
  absl::Status TakeRoom(const std::string& tenant, const KeyspaceId& keyspace,
                        std::span<const PageBytes> pages,
                        const std::function<uint64_t(Pages& held)>& note);
  void EndLease(const std::string& tenant, const KeyspaceId& keyspace,
                std::span<const PageKey> keys);
  // Ends up to `count` expired pins. Returns how many it ended.
  size_t ExpirePinsLocked(size_t count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UnpinLocked(const std::string& tenant, const PageName& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the bytes that the tenant has to take for these pages beyond those that it holds.
  uint64_t MissingLocked(const Pages& held, const KeyspaceId& keyspace,
                         std::span<const PageBytes> pages) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Page& EntryLocked(Pages& held, const KeyspaceId& keyspace, const PageBytes& page, uint64_t& added)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropIfUnusedLocked(const std::string& tenant, Pages& held, Pages::iterator page)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  TenantBudget budget_;
  const Clock& clock_;
  // Taken before mutex_ and the store's locks, for one page each; shared by pages of one hash.
  std::array<Mutex, kOrders> orders_;
  std::atomic<size_t> pin_count_{0};
  mutable Mutex mutex_;
  std::unordered_map<std::string, Pages> tenants_ ABSL_GUARDED_BY(mutex_);
  Pins pins_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
