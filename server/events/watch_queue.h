// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "common/mutex.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// A bounded queue of events that are to be sent to one watcher. The watcher's stream owns it;
// EventHub holds a weak reference, adds items under its own lock, and calls Wake behind it. A full
// queue loses events: the reader gets one item `lost` in their place and must read a snapshot
// again. Thread-safe.
class WatchQueue {
 public:
  // An event and its number; numbers ascend by more than 1 where events concern other keyspaces.
  struct Item {
    uint64_t sequence = 0;
    storage::PageEvent event;
    bool lost = false;  // events are missing before the next one; `event` says nothing
  };

  // `events_max` is limits.watch_queue. `wake` makes the stream send the queued items, and must not
  // block.
  WatchQueue(size_t events_max, std::function<void()> wake)
      : events_max_(events_max), wake_(std::move(wake)) {}

  // Adds an item. Returns false if the queue is full; the reader then gets one item `lost` behind
  // the queued ones.
  bool Add(const Item& item) {
    MutexLock lock(&mutex_);
    if (lost_ || items_.size() >= events_max_) {
      if (!lost_) items_.push_back({item.sequence, {}, true});
      lost_ = true;
      return false;
    }
    items_.push_back(item);
    return true;
  }

  // Removes and returns the oldest item, or nothing if there is none.
  std::optional<Item> Take() {
    MutexLock lock(&mutex_);
    if (items_.empty()) return std::nullopt;
    const Item item = items_.front();
    items_.pop_front();
    if (item.lost) lost_ = false;
    return item;
  }

  // Makes the reader look at the queue. Call after Add, without a lock.
  void Wake() const { wake_(); }

 private:
  const size_t events_max_;
  const std::function<void()> wake_;
  Mutex mutex_;
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;  // an item `lost` is queued, and is the last
  std::deque<Item> items_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
