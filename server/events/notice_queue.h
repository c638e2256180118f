// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/mutex.h"
#include "common/page_key.h"
#include "common/tenant_budget.h"
#include "server/base/random_id.h"
#include "server/keyspaces/keyspace.h"
#include "storage/device/device_pool_index.h"

namespace crumb::server {

// Notices that a session stream has still to send. The queue of a stream that is not read is
// bounded in two ways: by the number of its notices, and by their memory, which all queues take
// from one budget of the tenants. Thread-safe.
//
// Invariant: at most one state change of a keyspace waits.
class NoticeQueue {
 public:
  struct Durable {
    KeyspaceId keyspace;
    std::vector<PageKey> keys;
  };
  struct StateChange {
    KeyspaceId keyspace;
    KeyspaceState state;
    std::string reason;
    uint64_t generation = 0;
  };
  struct SlabGone {
    uint32_t slab = 0;
  };
  struct Demotions {
    RandomId pool;
    std::vector<storage::DemotionWork> work;
  };
  using Notice = std::variant<Durable, StateChange, SlabGone, Demotions>;

  // `wake` is called after each addition, never under a lock, and must not block. Memory is taken
  // from `bytes`, which must outlive this, in the name of `tenant`; null: it is not bounded.
  NoticeQueue(size_t notices_max, std::function<void()> wake, std::string tenant = "",
              TenantBudget* bytes = nullptr)
      : notices_max_(notices_max),
        wake_(std::move(wake)),
        tenant_(std::move(tenant)),
        bytes_(bytes) {}
  NoticeQueue(const NoticeQueue&) = delete;
  ~NoticeQueue();

  // The tenant whose session reads the notices; empty: none.
  const std::string& tenant() const { return tenant_; }

  // Adds `times` notices of a page. Returns how many there was room for.
  uint64_t AddDurable(const KeyspaceId& keyspace, const PageKey& key, uint64_t times = 1);
  // Adds the newest state of a keyspace. If one waits already, the new one takes its place, with
  // the higher one of their generations. Returns false if there is no room.
  bool AddStateChange(StateChange change);
  // These return false if there is no room.
  bool AddSlabGone(uint32_t slab);
  bool AddDemotions(Demotions demotions);

  // The oldest notice; durable pages that follow each other in one keyspace are one notice.
  std::optional<Notice> Take();

 private:
  // Adds a notice that counts as `size`.
  bool AddLocked(Notice notice, size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReplaceLocked(StateChange& queued, StateChange& change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TakeBytes(uint64_t bytes);
  void GiveBytes(uint64_t bytes);

  const size_t notices_max_;
  const std::function<void()> wake_;
  const std::string tenant_;
  TenantBudget* const bytes_;
  Mutex mutex_;
  size_t size_ ABSL_GUARDED_BY(mutex_) = 0;  // keys, changes and slots
  std::deque<Notice> notices_ ABSL_GUARDED_BY(mutex_);
  // The state changes in notices_, which stay where they are until they are taken.
  absl::flat_hash_map<KeyspaceId, StateChange*> changes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
