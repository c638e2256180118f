// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/mutex.h"
#include "common/tenant_budget.h"
#include "server/metrics/server_metrics.h"
#include "server/session/notice_queue.h"
#include "server/watch_queue.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Carries what happens in the store to those who wait for it: page events to watchers, durability
// and states to session streams. Never blocks. Thread-safe.
class EventHub {
 public:
  struct Options {
    size_t watchers_max = 64;
    size_t durable_waits_max = 262'144;
    int64_t part_max_percent = 100;  // of both, for one tenant
  };

  // `metrics` must outlive this.
  EventHub(const Options& options, ServerMetrics& metrics)
      : metrics_(metrics),
        watcher_budget_(options.watchers_max, options.part_max_percent),
        wait_budget_(options.durable_waits_max, options.part_max_percent) {}

  // Numbers an event and gives it to the watchers of its keyspace.
  void Publish(const storage::PageEvent& event);

  // Adds a watcher until it is destroyed. kResourceExhausted: there are too many, or too many of
  // the tenant. From now on events are queued; `sequence` is the last one that is not.
  absl::Status Watch(const std::string& tenant, const KeyspaceId& keyspace,
                     const std::shared_ptr<WatchQueue>& watcher, uint64_t& sequence);

  // From now on the page's durability goes to `notices`, once. Before its commit. Does nothing,
  // counted, when too many wait.
  void AwaitDurable(const PageKey& key, const std::shared_ptr<NoticeQueue>& notices);
  void ForgetDurable(const PageKey& key);
  void OnDurable(const KeyspaceId& keyspace, const PageKey& key);

  size_t watchers() const;

 private:
  struct Watcher {
    KeyspaceId keyspace;
    std::weak_ptr<WatchQueue> queue;
    std::string tenant;
  };
  struct DurableWait {
    std::weak_ptr<NoticeQueue> notices;
    std::string tenant;
  };
  void DropGoneLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServerMetrics& metrics_;
  TenantBudget watcher_budget_;
  TenantBudget wait_budget_;
  mutable Mutex mutex_;
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Watcher> watchers_ ABSL_GUARDED_BY(mutex_);
  // A key names its keyspace too. Entries of streams that ended go when their page is durable.
  std::unordered_map<PageKey, DurableWait> durable_waits_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
