// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/events/event_hub.h"

#include <algorithm>
#include <utility>

namespace crumb::server {
namespace {

// Pages whose waits of ended streams make room for one commit.
constexpr size_t kSweptPages = 64;

bool IsSame(const std::weak_ptr<NoticeQueue>& a, const std::weak_ptr<NoticeQueue>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

}  // namespace

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
  if (event.kind == storage::PageEvent::Kind::kRemoved) SettleWaits(event.keyspace, event.key);
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

// The wait is added first and the store looked at then, so that a page that becomes durable in
// between is not missed. Nothing is to be done for a commit that joins an earlier wait: the thread
// that added that wait looks at the store, and later changes are events of the page.
void EventHub::AwaitDurable(const FragmentHeader& fragment,
                            const std::shared_ptr<NoticeQueue>& notices) {
  const PageName page = {fragment.keyspace, fragment.key};
  if (!AddWait(page, fragment, notices)) return;
  const storage::TieredStore* const store = store_.load();
  if (store == nullptr) return;
  const storage::Durability state =
      store->DurabilityOf(fragment.keyspace, fragment.key, fragment.generation, fragment.range);
  if (state == storage::Durability::kPending) return;
  const std::optional<DurableWait> wait = TakeWait(page, fragment, notices);
  if (!wait || state != storage::Durability::kDurable) return;
  metrics_.notices_dropped.Add(wait->commits -
                               notices->AddDurable(page.first, page.second, wait->commits));
}

bool EventHub::AddWait(const PageName& page, const FragmentHeader& fragment,
                       const std::shared_ptr<NoticeQueue>& notices) {
  MutexLock lock(&mutex_);
  const auto found = durable_waits_.find(page);
  if (found != durable_waits_.end()) {
    for (DurableWait& wait : found->second.waits) {
      if (wait.generation != fragment.generation || wait.range != fragment.range) continue;
      if (!IsSame(wait.notices, notices)) continue;
      ++wait.commits;
      return false;
    }
  }
  const bool page_full = found != durable_waits_.end() && found->second.count >= page_waits_max_;
  if (page_full || TakeWaitRoomLocked(notices->tenant()) != TenantBudget::Taken::kYes) {
    metrics_.notices_dropped.Add();
    return false;
  }
  PageWaits& waits = durable_waits_[page];
  waits.waits.push_back({fragment.generation, fragment.range, notices, notices->tenant()});
  ++waits.count;
  ++streams_[notices->tenant()][notices][page];
  return true;
}

TenantBudget::Taken EventHub::TakeWaitRoomLocked(const std::string& tenant) {
  const TenantBudget::Taken taken = wait_budget_.Take(tenant);
  if (taken == TenantBudget::Taken::kYes) return taken;
  DropEndedWaitsLocked(tenant);
  return wait_budget_.Take(tenant);
}

std::optional<EventHub::DurableWait> EventHub::TakeWait(
    const PageName& page, const FragmentHeader& fragment,
    const std::shared_ptr<NoticeQueue>& notices) {
  MutexLock lock(&mutex_);
  const auto found = durable_waits_.find(page);
  if (found == durable_waits_.end()) return std::nullopt;
  std::vector<DurableWait>& waits = found->second.waits;
  const auto wait = std::find_if(waits.begin(), waits.end(), [&](const DurableWait& other) {
    return other.generation == fragment.generation && other.range == fragment.range &&
           IsSame(other.notices, notices);
  });
  if (wait == waits.end()) return std::nullopt;
  DurableWait taken = std::move(*wait);
  waits.erase(wait);
  ForgetLocked(page, taken);
  return taken;
}

void EventHub::SettleWaits(const KeyspaceId& keyspace, const PageKey& key) {
  const PageName page = {keyspace, key};
  const storage::TieredStore* const store = store_.load();
  std::vector<DurableWait> waits;
  {
    MutexLock lock(&mutex_);
    const auto found = durable_waits_.find(page);
    if (found == durable_waits_.end() || store == nullptr) return;
    if (found->second.settling) {
      found->second.again = true;
      return;
    }
    found->second.settling = true;
    waits.swap(found->second.waits);
  }
  bool again = true;
  while (again) {
    std::vector<DurableWait> ended;
    std::vector<DurableWait> pending;
    for (DurableWait& wait : waits) {
      const std::shared_ptr<NoticeQueue> notices = wait.notices.lock();
      const storage::Durability state =
          notices == nullptr ? storage::Durability::kNone
                             : store->DurabilityOf(keyspace, key, wait.generation, wait.range);
      if (state == storage::Durability::kDurable) {
        metrics_.notices_dropped.Add(wait.commits -
                                     notices->AddDurable(keyspace, key, wait.commits));
      }
      (state == storage::Durability::kPending ? pending : ended).push_back(std::move(wait));
    }
    again = EndSettling(page, ended, pending);
    waits = std::move(pending);
  }
}

bool EventHub::EndSettling(const PageName& page, const std::vector<DurableWait>& ended,
                           std::vector<DurableWait>& pending) {
  MutexLock lock(&mutex_);
  PageWaits& waits = durable_waits_.find(page)->second;  // it stays while it is being settled
  for (DurableWait& wait : pending) waits.waits.push_back(std::move(wait));
  pending.clear();
  for (const DurableWait& wait : ended) ForgetLocked(page, wait);
  if (std::exchange(waits.again, false)) {
    pending.swap(waits.waits);
    return true;
  }
  waits.settling = false;
  if (waits.count == 0) durable_waits_.erase(page);
  return false;
}

void EventHub::ForgetLocked(const PageName& page, const DurableWait& wait) {
  wait_budget_.Give(wait.tenant);
  const auto streams = streams_.find(wait.tenant);
  const auto stream = streams->second.find(wait.notices);
  const auto on_page = stream->second.find(page);
  if (--on_page->second == 0) stream->second.erase(on_page);
  if (stream->second.empty()) streams->second.erase(stream);
  if (streams->second.empty()) streams_.erase(streams);
  const auto waits = durable_waits_.find(page);
  if (--waits->second.count == 0 && !waits->second.settling) durable_waits_.erase(waits);
}

void EventHub::DropEndedWaitsLocked(const std::string& tenant) {
  std::vector<PageName> pages;
  const auto find_in = [&pages](const Streams& streams) {
    for (const auto& [notices, stream] : streams) {
      if (!notices.expired()) continue;
      for (const auto& [page, count] : stream) {
        if (pages.size() == kSweptPages) return;
        pages.push_back(page);
      }
    }
  };
  const auto own = streams_.find(tenant);
  if (own != streams_.end()) find_in(own->second);
  for (auto other = streams_.begin(); other != streams_.end() && pages.empty(); ++other) {
    find_in(other->second);
  }
  for (const PageName& page : pages) {
    const auto found = durable_waits_.find(page);
    if (found == durable_waits_.end()) continue;
    std::vector<DurableWait>& waits = found->second.waits;
    const auto gone =
        std::stable_partition(waits.begin(), waits.end(),
                              [](const DurableWait& wait) { return !wait.notices.expired(); });
    std::vector<DurableWait> ended(std::make_move_iterator(gone),
                                   std::make_move_iterator(waits.end()));
    waits.erase(gone, waits.end());
    for (const DurableWait& wait : ended) ForgetLocked(page, wait);
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
