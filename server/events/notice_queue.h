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

#include "common/mutex.h"
#include "common/page_key.h"
#include "common/random_id.h"
#include "server/keyspaces/keyspace.h"
#include "storage/device_pool_index.h"

namespace crumb::server {

// Notices that a session stream has still to send, bounded. Thread-safe.
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

  // `wake` is called after each addition, never under a lock, and must not block.
  NoticeQueue(size_t notices_max, std::function<void()> wake, std::string tenant = "")
      : notices_max_(notices_max), wake_(std::move(wake)), tenant_(std::move(tenant)) {}

  // The tenant whose session reads the notices; empty: none.
  const std::string& tenant() const { return tenant_; }

  // Adds `times` notices of a page. Returns how many there was room for.
  uint64_t AddDurable(const KeyspaceId& keyspace, const PageKey& key, uint64_t times = 1);
  // These return false when the queue is full.
  bool AddStateChange(StateChange change);
  bool AddSlabGone(uint32_t slab);
  bool AddDemotions(Demotions demotions);

  // The oldest notice; durable pages that follow each other in one keyspace are one notice.
  std::optional<Notice> Take();

 private:
  bool Add(Notice notice);

  const size_t notices_max_;
  const std::function<void()> wake_;
  const std::string tenant_;
  Mutex mutex_;
  size_t size_ ABSL_GUARDED_BY(mutex_) = 0;  // keys, changes and slots
  std::deque<Notice> notices_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
