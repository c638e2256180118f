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

absl::Status EventHub::Watch(const std::string& tenant, const KeyspaceId& keyspace,
                             const std::shared_ptr<WatchQueue>& watcher, uint64_t& sequence) {
  MutexLock lock(&mutex_);
  DropGoneLocked();
  const TenantBudget::Taken taken = watcher_budget_.Take(tenant);
  if (taken != TenantBudget::Taken::kYes) {
    metrics_.Reject(Rejection::kWatchers, taken);
    return TenantBudget::Error(taken, "limits.watchers_max");
  }
  watchers_.push_back({keyspace, watcher, tenant});
  sequence = sequence_;
  return absl::OkStatus();
}

void EventHub::AwaitDurable(const PageKey& key, const std::shared_ptr<NoticeQueue>& notices) {
  MutexLock lock(&mutex_);
  const auto known = durable_waits_.find(key);
  if (known != durable_waits_.end()) {
    known->second.notices = notices;
    return;
  }
  if (wait_budget_.Take(notices->tenant()) != TenantBudget::Taken::kYes) {
    metrics_.notices_dropped.Add();
    return;
  }
  durable_waits_.emplace(key, DurableWait{notices, notices->tenant()});
}

void EventHub::ForgetDurable(const PageKey& key) {
  MutexLock lock(&mutex_);
  const auto found = durable_waits_.find(key);
  if (found == durable_waits_.end()) return;
  wait_budget_.Give(found->second.tenant);
  durable_waits_.erase(found);
}

void EventHub::OnDurable(const KeyspaceId& keyspace, const PageKey& key) {
  std::shared_ptr<NoticeQueue> notices;
  {
    MutexLock lock(&mutex_);
    const auto found = durable_waits_.find(key);
    if (found == durable_waits_.end()) return;
    notices = found->second.notices.lock();
    wait_budget_.Give(found->second.tenant);
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
  std::erase_if(watchers_, [this](const Watcher& watcher) {
    if (!watcher.queue.expired()) return false;
    watcher_budget_.Give(watcher.tenant);
    return true;
  });
}

}  // namespace crumb::server
