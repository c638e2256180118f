// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <list>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "common/page_key.h"

namespace crumb::storage {

// Pages that a writer announced to commit. A hint ends by itself after a while, or when there are
// more than `hints_max`: then the tenant with most hints loses its oldest. Thread-safe.
class PendingHints {
 public:
  PendingHints(const Clock& clock, Duration lasts, size_t hints_max)
      : clock_(clock), lasts_(lasts), hints_max_(hints_max) {}

  // tenant: the keyspace's, "" for none.
  void Set(const KeyspaceId& keyspace, const std::string& tenant, std::span<const PageKey> keys);
  bool Has(const KeyspaceId& keyspace, const PageKey& key) const;
  // Returns how many hints were forgotten before their time, because there were too many.
  uint64_t forgotten() const { return forgotten_.value(); }

 private:
  using Name = std::pair<KeyspaceId, PageKey>;
  struct Hint;
  using Hints = std::list<Hint>;
  using Queue = std::deque<Hints::iterator>;               // one tenant's hints, the oldest first
  using Tenants = std::unordered_map<std::string, Queue>;  // those with hints
  struct Hint {
    TimePoint until;
    Name name;
    Tenants::value_type* tenant = nullptr;
  };

  void SetPiece(const KeyspaceId& keyspace, const std::string& tenant,
                std::span<const PageKey> keys);
  // Takes out hints that are over, `most` of them at most, and returns how many it took out.
  size_t EndOld(TimePoint now, size_t most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes out hints until there are no more than hints_max_, `most` of them at most. Costs one step
  // for each tenant with hints, and a few for each hint.
  void Shorten(size_t most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes out a tenant's oldest hint. Returns false if it had been renewed: then the page has a
  // younger one.
  bool PopOldest(Queue& queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Clock& clock_;
  const Duration lasts_;
  const size_t hints_max_;
  Counter forgotten_;
  mutable Mutex mutex_;
  absl::flat_hash_map<Name, TimePoint> until_ ABSL_GUARDED_BY(mutex_);
  // Every hint lasts as long, so the oldest ends first.
  Hints hints_ ABSL_GUARDED_BY(mutex_);
  Tenants tenants_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
