// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <span>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "common/page_key.h"

namespace crumb::storage {

// Pages that a writer announced to commit. A hint ends by itself after a while, or when the
// oldest of `hints_max` has to make room. Thread-safe.
class PendingHints {
 public:
  PendingHints(const Clock& clock, Duration lasts, size_t hints_max)
      : clock_(clock), lasts_(lasts), hints_max_(hints_max) {}

  void Set(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  bool Has(const KeyspaceId& keyspace, const PageKey& key) const;

 private:
  void SetPiece(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  using Name = std::pair<KeyspaceId, PageKey>;
  struct Hint {
    TimePoint until;
    Name name;
  };

  const Clock& clock_;
  const Duration lasts_;
  const size_t hints_max_;
  mutable Mutex mutex_;
  absl::flat_hash_map<Name, TimePoint> hints_ ABSL_GUARDED_BY(mutex_);
  std::deque<Hint> by_age_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
