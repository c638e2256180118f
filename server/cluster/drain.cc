// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/drain.h"

#include <utility>
#include <vector>

#include "common/logging.h"

namespace crumb::server {
namespace {

// Pause before the queue of offers, or the offers in progress, are checked again. It is short
// compared with the seconds that a drain takes.
constexpr auto kStep = std::chrono::milliseconds(20);
// Longest time that a page takes from the SSD; a page that takes longer counts as unread.
constexpr auto kReadDeadline = std::chrono::seconds(5);

}  // namespace

void Drain::Start(std::function<void()> drained) {
  MutexLock lock(&mutex_);
  if (started_ || stopping_) return;
  started_ = true;
  thread_ = Thread("crumb-drain", [this, drained = std::move(drained)] { Run(drained); });
}

void Drain::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

bool Drain::Wait(Duration most) {
  const auto until = std::chrono::steady_clock::now() + most;
  MutexLock lock(&mutex_);
  while (!stopping_) {
    if (!changed_.WaitUntil(&mutex_, until)) break;
  }
  return !stopping_;
}

void Drain::Run(const std::function<void()>& drained) {
  std::vector<std::pair<std::shared_ptr<Keyspace>, std::vector<PageKey>>> pages;
  uint64_t total = 0;
  for (const auto& keyspace : keyspaces_.List()) {
    std::vector<PageKey> keys;
    store_.ForEachPage(keyspace->id, [&keys](const PageKey& key, Tier tier) {
      // No other node can read pages on a device.
      if (tier != Tier::kDevice) keys.push_back(key);
    });
    total += keys.size();
    pages.emplace_back(keyspace, std::move(keys));
  }
  left_.store(total);
  uint64_t unread = 0;
  LogInfo("draining: {} pages are offered to their new homes", total);
  for (const auto& [keyspace, keys] : pages) {
    for (const PageKey& key : keys) {
      {
        MutexLock lock(&mutex_);
        if (stopping_) return;
      }
      if (!OfferPage(*keyspace, key)) {
        pusher_.NoteDrop(PushDrop::kUnread);
        ++unread;
      }
      left_.fetch_sub(1);
    }
  }
  while (pusher_.pending() > 0) {
    if (!Wait(kStep)) return;
  }
  LogInfo("drained: {} of {} pages were offered, the others could not be read", total - unread,
          total);
  drained();
}

// Brings the page up for a moment to read its header; pages in both tiers are offered twice, and
// found there the second time. False: it is not all here, or the store does not give it in time.
bool Drain::OfferPage(const Keyspace& keyspace, const PageKey& key) {
  struct Pending {
    Mutex mutex;
    CondVar ready;
    bool done ABSL_GUARDED_BY(mutex) = false;
    storage::AcquireResult result ABSL_GUARDED_BY(mutex);
  };
  auto pending = std::make_shared<Pending>();
  storage::AcquireRequest request;
  request.keyspace = keyspace.id;
  request.generation = keyspace.generation.load();
  request.keys = {key};
  request.range = keyspace.geometry.all_tiles();
  request.deadline = clock_.Now() + kReadDeadline;
  store_.Acquire(std::move(request), [pending](absl::StatusOr<storage::AcquireResult> result) {
    MutexLock lock(&pending->mutex);
    if (result.ok()) pending->result = *std::move(result);
    pending->done = true;
    pending->ready.NotifyAll();
  });
  storage::AcquireResult result;
  {
    MutexLock lock(&pending->mutex);
    while (!pending->done) pending->ready.Wait(&pending->mutex);
    result = pending->result;
  }
  if (result.lease == 0) return false;
  bool whole = true;
  for (const storage::FragmentRef& fragment : result.fragments) {
    const auto header = DecodeFragmentHeader(store_.Bytes(fragment).subspan(fragment.tiles_bytes));
    whole &= header.ok();
    if (!header.ok()) continue;
    pusher_.WaitForRoom(clock_.Now() + kReadDeadline);
    pusher_.Offer(*header);
  }
  store_.Release(result.lease);
  return whole;
}

}  // namespace crumb::server
