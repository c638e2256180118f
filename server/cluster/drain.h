// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "server/cluster/pusher.h"
#include "server/keyspaces/keyspace_registry.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Offers every page that this node holds to its homes, once, on a thread of its own. Thread-safe.
class Drain {
 public:
  // The references must outlive this.
  Drain(storage::TieredStore& store, const KeyspaceRegistry& keyspaces, Pusher& pusher,
        const Clock& clock)
      : store_(store), keyspaces_(keyspaces), pusher_(pusher), clock_(clock) {}
  ~Drain() { Stop(); }

  // Starts unless it was; `drained` is called on its thread once every offer has a response.
  void Start(std::function<void()> drained);
  void Stop();

  // Pages that were not offered yet, and offers without a response yet.
  uint64_t pages_left() const { return left_.load() + pusher_.pending(); }

 private:
  void Run(const std::function<void()>& drained);
  bool OfferPage(const Keyspace& keyspace, const PageKey& key);
  bool Wait(Duration most);

  storage::TieredStore& store_;
  const KeyspaceRegistry& keyspaces_;
  Pusher& pusher_;
  const Clock& clock_;
  std::atomic<uint64_t> left_{0};
  Mutex mutex_;
  CondVar changed_;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::server
