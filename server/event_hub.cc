// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/event_hub.h"

#include <algorithm>
#include <utility>

namespace crumb::server {

void EventHub::Publish(const storage::PageEvent& event) {
  std::vector<std::shared_ptr<WatchQueue>> touched;
  {
    MutexLock lock(&mutex_);
    ++sequence_;
    // Queued under the lock, so that every watcher sees the numbers ascend.
    for (const Watcher& watcher : watchers_) {
      if (watcher.keyspace != event.keyspace) continue;
      auto queue = watcher.queue.lock();
      if (queue == nullptr) continue;
      if (!queue->Add({sequence_, event})) metrics_.events_lost.Add();
      touched.push_back(std::move(queue));
    }
  }
  for (const auto& queue : touched) queue->Wake();
}

bool EventHub::Watch(const KeyspaceId& keyspace, const std::shared_ptr<WatchQueue>& watcher,
                     uint64_t& sequence) {
  MutexLock lock(&mutex_);
  DropGoneLocked();
  if (watchers_.size() >= options_.watchers_max) {
    metrics_.Reject(Rejection::kWatchers);
    return false;
  }
  watchers_.push_back({keyspace, watcher});
  sequence = sequence_;
  return true;
}

void EventHub::AwaitDurable(const PageKey& key, const std::shared_ptr<NoticeQueue>& notices) {
  MutexLock lock(&mutex_);
  if (durable_waits_.size() >= options_.durable_waits_max) {
    metrics_.notices_dropped.Add();
    return;
  }
  durable_waits_[key] = notices;
}

void EventHub::ForgetDurable(const PageKey& key) {
  MutexLock lock(&mutex_);
  durable_waits_.erase(key);
}

void EventHub::OnDurable(const KeyspaceId& keyspace, const PageKey& key) {
  std::shared_ptr<NoticeQueue> notices;
  {
    MutexLock lock(&mutex_);
    const auto found = durable_waits_.find(key);
    if (found == durable_waits_.end()) return;
    notices = found->second.lock();
    durable_waits_.erase(found);
  }
  if (notices != nullptr && !notices->AddDurable(keyspace, key)) metrics_.notices_dropped.Add();
}

size_t EventHub::watchers() const {
  MutexLock lock(&mutex_);
  return static_cast<size_t>(std::count_if(watchers_.begin(), watchers_.end(),
                                           [](const Watcher& w) { return !w.queue.expired(); }));
}

void EventHub::DropGoneLocked() {
  std::erase_if(watchers_, [](const Watcher& watcher) { return watcher.queue.expired(); });
}

}  // namespace crumb::server
