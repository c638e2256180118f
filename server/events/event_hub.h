// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/tenant_budget.h"
#include "server/events/notice_queue.h"
#include "server/events/watch_queue.h"
#include "server/metrics/server_metrics.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Carries events of the store to their readers: page events to watchers, durability to session
// streams. Never blocks. Thread-safe.
//
// The writer of a page that is not durable yet leaves a wait: the page, the fragment that it
// committed, and the stream that gets the notice. Commits of one fragment by one session share one
// wait, which counts them. A commit costs O(waits of the page) comparisons and one read of the
// store; an event of a page costs one read for each of its waits, without the lock. The waits of a
// page are bounded, so that neither cost grows with the number of a session's commits. The daemon
// owns it. The store calls Publish and SettleWaits on its own threads, calls of clients the other
// functions.
class EventHub {
 public:
  // Bounds, from Limits by EventBoundsOf; each is a number at one time.
  struct Options {
    size_t watchers_max = 64;
    size_t durable_waits_max = 262'144;
    int64_t part_max_percent = 100;  // percentage of each limit that one tenant may have
    size_t durable_waits_per_page_max = 1024;
    size_t snapshot_pages_max = 8'388'608;
    size_t notice_bytes_max = size_t{64} << 20;
  };

  // `metrics` must outlive this.
  EventHub(const Options& options, ServerMetrics& metrics)
      : page_waits_max_(options.durable_waits_per_page_max),
        metrics_(metrics),
        watcher_budget_(options.watchers_max, options.part_max_percent),
        wait_budget_(options.durable_waits_max, options.part_max_percent),
        snapshot_budget_(options.snapshot_pages_max, options.part_max_percent),
        notice_budget_(options.notice_bytes_max, options.part_max_percent) {}

  // Numbers an event and gives it to the watchers of its keyspace, who see the numbers ascend. A
  // removal also settles the waits for the page.
  void Publish(const storage::PageEvent& event);

  // Adds a watcher until it is destroyed. kResourceExhausted: there are too many, or too many of
  // the tenant. From now on events are queued; `sequence` is the last one that is not.
  absl::Status Watch(const std::string& tenant, const KeyspaceId& keyspace,
                     const std::shared_ptr<WatchQueue>& watcher, uint64_t& sequence);

  // The store whose pages' durability is awaited; null: none from now on. It outlives calls here.
  void SetStore(const storage::TieredStore* store) { store_.store(store); }

  // Notifies `notices` once the tiles of a fragment that was committed, by this writer or by
  // another, are durable: at once if they are. Not if they cannot become so, or leave before. Call
  // after the commit, once for each: each gets a notice of its own. Does nothing, counted, if too
  // many waits are pending.
  void AwaitDurable(const FragmentHeader& fragment, const std::shared_ptr<NoticeQueue>& notices);
  // Ends the waits for a page, of whose fragments some became durable or left: notifies those whose
  // tiles are durable, and forgets those whose tiles are not here any more.
  void SettleWaits(const KeyspaceId& keyspace, const PageKey& key);

  // Returns the number of watchers whose stream has not ended.
  size_t watchers() const;

  // Pages in the snapshots of watchers that are not sent yet.
  TenantBudget& snapshot_pages() { return snapshot_budget_; }
  // Memory of the notices that wait in the queues of all session streams.
  TenantBudget& notice_bytes() { return notice_budget_; }

 private:
  // A watcher of one keyspace. Its place in the budget is returned when the next one is added after
  // its stream has ended.
  struct Watcher {
    KeyspaceId keyspace;
    std::weak_ptr<WatchQueue> queue;
    std::string tenant;
  };
  using PageName = std::pair<KeyspaceId, PageKey>;
  // A wait for one fragment of a page by one stream.
  struct DurableWait {
    uint64_t generation = 0;
    TileRange range;
    std::weak_ptr<NoticeQueue> notices;
    std::string tenant;    // the wait takes one unit of this tenant's part
    uint64_t commits = 1;  // each gets a notice
  };
  // One thread settles the waits of a page at a time, and has them out of `waits` meanwhile. An
  // event that comes then sets `again`, and that thread looks at the page once more.
  struct PageWaits {
    std::vector<DurableWait> waits;
    size_t count = 0;  // number of waits, including those that are being settled
    bool settling = false;
    bool again = false;
  };
  // How many waits a stream has on each page.
  using StreamWaits = std::map<PageName, size_t>;
  using Streams = std::map<std::weak_ptr<NoticeQueue>, StreamWaits, std::owner_less<>>;

  // Removes watchers whose stream has ended.
  void DropGoneLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns true if a wait was added. Else an earlier commit's wait counts this one too, or there
  // is no room for a wait, and the notice is dropped.
  bool AddWait(const PageName& page, const FragmentHeader& fragment,
               const std::shared_ptr<NoticeQueue>& notices);
  // Takes room for one wait; if there is none, forgets waits of ended streams and tries once more.
  TenantBudget::Taken TakeWaitRoomLocked(const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes one wait out. nullopt: another thread settles it.
  std::optional<DurableWait> TakeWait(const PageName& page, const FragmentHeader& fragment,
                                      const std::shared_ptr<NoticeQueue>& notices);
  // Forgets `ended` and puts `pending` back. Returns true, with the page's waits in `pending`, if
  // they must be looked at again.
  bool EndSettling(const PageName& page, const std::vector<DurableWait>& ended,
                   std::vector<DurableWait>& pending);
  // Gives the room of a wait back that is not in its page's list any more.
  void ForgetLocked(const PageName& page, const DurableWait& wait)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets waits of streams that ended: of a bounded number of pages, the tenant's own first.
  void DropEndedWaitsLocked(const std::string& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t page_waits_max_;
  ServerMetrics& metrics_;
  TenantBudget watcher_budget_;
  TenantBudget wait_budget_;
  TenantBudget snapshot_budget_;
  TenantBudget notice_budget_;
  // Guards the watchers and the waits. The store is never called under it; queues are.
  mutable Mutex mutex_;
  // Number of the last event.
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Watcher> watchers_ ABSL_GUARDED_BY(mutex_);
  std::atomic<const storage::TieredStore*> store_{nullptr};
  // Invariant: each wait counts in its page's `count`, in its stream's map and in wait_budget_.
  absl::flat_hash_map<PageName, PageWaits> durable_waits_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Streams> streams_ ABSL_GUARDED_BY(mutex_);  // keyed by tenant
};

}  // namespace crumb::server
