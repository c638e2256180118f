// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "common/mutex.h"

namespace crumb {

// Returns the part of `total` units that a tenant may hold while the others hold `others`:
// `part_max_percent` of the remaining units.
inline uint64_t TenantPart(uint64_t total, uint64_t others, int64_t part_max_percent) {
  const auto percent = static_cast<uint64_t>(part_max_percent);
  const uint64_t left = total > others ? total - others : 0;
  // Divided first, so that totals in bytes do not overflow.
  return left / 100 * percent + left % 100 * percent / 100;
}

// A bounded resource that several tenants draw from: streams, queue places, sessions, bytes. No
// tenant can take all of it: a tenant may hold at most `part_max_percent` of the units that others
// do not hold. With 50, a tenant that is alone gets one half, a second one a quarter, a third one
// an eighth, and so on; the rest is there for the next tenant at once, without anything being taken
// back. A tenant that holds nothing is granted one unit while any is left, so that a
// resource of few units serves as many tenants as it has units; of a resource in bytes the part of
// the next tenant gets smaller instead, down to nothing.
//
// With 100 tenants are not separated: the total alone counts, at the cost of one atomic addition.
//
// Invariants: used() <= total unless Add() went beyond it; used() is the sum over all tenants.
// Thread-safe.
class TenantBudget {
 public:
  // The result of Take. kTotalFull: the resource is used up; kPartFull: the tenant holds its part.
  enum class Taken : uint8_t { kYes, kTotalFull, kPartFull };

  // REQUIRES: part_max_percent is from 1 to 100.
  TenantBudget(uint64_t total, int64_t part_max_percent)
      : total_(total), part_max_percent_(part_max_percent) {}
  TenantBudget(const TenantBudget&) = delete;

  // Takes `amount` units for a tenant, or none. Taking 0 units always succeeds, also for a tenant
  // that holds more than its part since others came. The empty name is a tenant like any other.
  Taken Take(const std::string& tenant, uint64_t amount = 1);
  // Takes units without a limit, for objects that exist already, such as records read at a start.
  void Add(const std::string& tenant, uint64_t amount);
  // Returns units that the tenant holds.
  void Give(const std::string& tenant, uint64_t amount = 1);

  uint64_t total() const { return total_; }
  uint64_t used() const { return used_.load(); }
  // 0 while tenants are not separated.
  uint64_t used_by(const std::string& tenant) const;

  // kResourceExhausted for a Take that failed; `key` is the setting that bounds the total.
  static absl::Status Error(Taken taken, const char* key);

 private:
  bool separates_tenants() const { return part_max_percent_ < 100; }

  const uint64_t total_;
  const int64_t part_max_percent_;
  std::atomic<uint64_t> used_{0};
  mutable Mutex mutex_;
  // Tenants that hold something.
  std::unordered_map<std::string, uint64_t> held_ ABSL_GUARDED_BY(mutex_);
};

// Units of a budget that are returned when this ends. The budget must outlive it.
class TenantGrant {
 public:
  using Taken = TenantBudget::Taken;

  TenantGrant(TenantBudget& budget, std::string tenant, uint64_t amount = 1)
      : budget_(budget),
        tenant_(std::move(tenant)),
        amount_(amount),
        taken_(budget.Take(tenant_, amount)) {}
  TenantGrant(const TenantGrant&) = delete;
  ~TenantGrant() {
    if (taken_ == Taken::kYes) budget_.Give(tenant_, amount_);
  }
  Taken taken() const { return taken_; }

 private:
  TenantBudget& budget_;
  const std::string tenant_;
  const uint64_t amount_;
  const Taken taken_;
};

}  // namespace crumb
