// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/fragment_header.h"
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

  // The store whose pages' durability is awaited; null: none from now on. It outlives calls here.
  void SetStore(const storage::TieredStore* store) { store_.store(store); }

  // Notifies `notices` once the tiles of a fragment that was committed, by this writer or by
  // another, are durable: at once if they are. Not if they cannot become so, or leave before. Call
  // after the commit. Does nothing, counted, if too many waits are pending.
  void AwaitDurable(const FragmentHeader& fragment, const std::shared_ptr<NoticeQueue>& notices);
  // Fragments of this page became durable.
  void OnDurable(const KeyspaceId& keyspace, const PageKey& key);

  size_t watchers() const;

 private:
  struct Watcher {
    KeyspaceId keyspace;
    std::weak_ptr<WatchQueue> queue;
    std::string tenant;
  };
  struct DurableWait {
    uint64_t number = 0;
    KeyspaceId keyspace;
    uint64_t generation = 0;
    TileRange range;
    std::weak_ptr<NoticeQueue> notices;
    std::string tenant;  // whose part of the waits this one takes
  };
  void DropGoneLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the waits for a page whose fragments are durable, or are here no more.
  void SettleWaits(const PageKey& key);
  // False: another thread ended it.
  bool TakeWait(const PageKey& key, uint64_t number);
  // Forgets the waits for which `gone` holds, and gives their tenants' parts back.
  size_t EraseWaitsLocked(std::vector<DurableWait>& waits,
                          const std::function<bool(const DurableWait&)>& gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the waits of streams that ended.
  void DropEndedWaitsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServerMetrics& metrics_;
  TenantBudget watcher_budget_;
  TenantBudget wait_budget_;
  mutable Mutex mutex_;
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Watcher> watchers_ ABSL_GUARDED_BY(mutex_);
  std::atomic<const storage::TieredStore*> store_{nullptr};
  // A key names its keyspace too. A wait ends when its fragment is durable or gone; those of
  // streams that ended make room when it is needed.
  std::unordered_map<PageKey, std::vector<DurableWait>> durable_waits_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_wait_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t waits_refused_ ABSL_GUARDED_BY(mutex_) = 0;  // since those of ended streams were dropped
};

}  // namespace crumb::server
