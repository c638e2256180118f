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

// Notices that a session stream has still to send. The stream of the session owns the queue; the
// Session and the waits of EventHub refer to it. The queue of a stream that is not read is bounded
// in two ways: by the number of its notices, and by their memory, which all queues take from one
// budget of the tenants. Thread-safe.
//
// Invariant: at most one state change of a keyspace waits.
class NoticeQueue {
 public:
  // Pages of a keyspace that are durable now; a key is there once for each commit that waited.
  struct Durable {
    KeyspaceId keyspace;
    std::vector<PageKey> keys;
  };
  // A keyspace has another state or a higher generation.
  struct StateChange {
    KeyspaceId keyspace;
    KeyspaceState state;
    std::string reason;
    uint64_t generation = 0;
  };
  // A slab that the process has may be given to another tenant: it must be unmapped.
  struct SlabGone {
    uint32_t slab = 0;
  };
  // Pages of a device pool that the process is to copy to its staging memory, because crumbd needs
  // their slots.
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
  // Adds a slab that the process must unmap. Returns false if there is no room.
  bool AddSlabGone(uint32_t slab);
  // Adds pages to copy, all or none; each counts as one notice. Returns false if there is no room.
  bool AddDemotions(Demotions demotions);

  // Removes and returns the oldest notice, or nothing if there is none. Durable pages that follow
  // each other in one keyspace are one notice, of 4,096 keys at most.
  std::optional<Notice> Take();

 private:
  // Adds a notice that counts as `size`. Returns false, and adds nothing, if a bound is reached.
  bool AddLocked(Notice notice, size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Puts `change` in the place of `queued`. Its reason is left out if there is no memory for it.
  void ReplaceLocked(StateChange& queued, StateChange& change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes memory from the tenants' budget, and returns it.
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
