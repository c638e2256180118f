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

// Counts the Prefetch calls that are under way, of all callers and of each tenant. No caller waits
// for a Prefetch, so only this keeps one from starting more of them than the disk and the other
// nodes can serve. Thread-safe; its places must not outlive it. The daemon owns it.
class PrefetchBudget {
 public:
  // limits.prefetches_max and limits.tenant_prefetches_max.
  struct Options {
    size_t all_max = 64;
    size_t tenant_max = 16;
  };

  // One Prefetch under way, until this goes.
  class Place {
   public:
    Place(PrefetchBudget& budget, std::string tenant)
        : budget_(budget), tenant_(std::move(tenant)) {}
    Place(const Place&) = delete;
    ~Place() { budget_.GiveBack(tenant_); }

   private:
    PrefetchBudget& budget_;
    const std::string tenant_;
  };

  explicit PrefetchBudget(const Options& options) : options_(options) {}

  // Returns null if the maximum of prefetches is in progress, for all callers or for this tenant.
  // Callers without a tenant ("") use the total alone.
  std::unique_ptr<Place> Take(const std::string& tenant) {
    MutexLock lock(&mutex_);
    if (all_ >= options_.all_max) return nullptr;
    const auto of_tenant = of_tenants_.try_emplace(tenant, 0).first;
    if (!tenant.empty() && of_tenant->second >= options_.tenant_max) return nullptr;
    ++all_;
    ++of_tenant->second;
    return std::make_unique<Place>(*this, tenant);
  }

  // Returns the number of Prefetches that hold a place.
  size_t under_way() const {
    MutexLock lock(&mutex_);
    return all_;
  }

 private:
  void GiveBack(const std::string& tenant) {
    MutexLock lock(&mutex_);
    --all_;
    const auto of_tenant = of_tenants_.find(tenant);
    if (--of_tenant->second == 0) of_tenants_.erase(of_tenant);
  }

  const Options options_;
  mutable Mutex mutex_;
  size_t all_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::string, size_t> of_tenants_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
