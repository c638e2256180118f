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
  if (event.kind == storage::PageEvent::Kind::kRemoved) SettleWaits(event.key);
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

// Registered first and looked at then, so that a page that becomes durable in between is not
// missed.
void EventHub::AwaitDurable(const FragmentHeader& fragment,
                            const std::shared_ptr<NoticeQueue>& notices) {
  {
    MutexLock lock(&mutex_);
    TenantBudget::Taken taken = wait_budget_.Take(notices->tenant());
    if (taken != TenantBudget::Taken::kYes) {
      DropEndedWaitsLocked();
      taken = wait_budget_.Take(notices->tenant());
    }
    if (taken != TenantBudget::Taken::kYes) {
      metrics_.notices_dropped.Add();
      return;
    }
    durable_waits_[fragment.key].push_back({++last_wait_, fragment.keyspace, fragment.generation,
                                            fragment.range, notices, notices->tenant()});
  }
  SettleWaits(fragment.key);
}

void EventHub::OnDurable(const KeyspaceId&, const PageKey& key) { SettleWaits(key); }

void EventHub::SettleWaits(const PageKey& key) {
  const storage::TieredStore* const store = store_.load();
  std::vector<DurableWait> waits;
  {
    MutexLock lock(&mutex_);
    const auto found = durable_waits_.find(key);
    if (found == durable_waits_.end() || store == nullptr) return;
    waits = found->second;
  }
  for (const DurableWait& wait : waits) {
    const storage::Durability state =
        store->DurabilityOf(wait.keyspace, key, wait.generation, wait.range);
    if (state == storage::Durability::kPending || !TakeWait(key, wait.number)) continue;
    const std::shared_ptr<NoticeQueue> notices = wait.notices.lock();
    if (state == storage::Durability::kNone || notices == nullptr) continue;
    if (!notices->AddDurable(wait.keyspace, key)) metrics_.notices_dropped.Add();
  }
}

bool EventHub::TakeWait(const PageKey& key, uint64_t number) {
  MutexLock lock(&mutex_);
  const auto found = durable_waits_.find(key);
  if (found == durable_waits_.end()) return false;
  const bool taken = EraseWaitsLocked(found->second, [number](const DurableWait& wait) {
                       return wait.number == number;
                     }) > 0;
  if (found->second.empty()) durable_waits_.erase(found);
  return taken;
}

size_t EventHub::EraseWaitsLocked(std::vector<DurableWait>& waits,
                                  const std::function<bool(const DurableWait&)>& gone) {
  return std::erase_if(waits, [&](const DurableWait& wait) {
    if (!gone(wait)) return false;
    wait_budget_.Give(wait.tenant);
    return true;
  });
}

// Once for so many waits that found no room that each pays for a few others only.
void EventHub::DropEndedWaitsLocked() {
  constexpr size_t kWaitsPerSearch = 8;
  if (++waits_refused_ * kWaitsPerSearch < wait_budget_.total()) return;
  waits_refused_ = 0;
  for (auto waits = durable_waits_.begin(); waits != durable_waits_.end();) {
    EraseWaitsLocked(waits->second, [](const DurableWait& wait) { return wait.notices.expired(); });
    waits = waits->second.empty() ? durable_waits_.erase(waits) : std::next(waits);
  }
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
