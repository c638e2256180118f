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

// Offers every page that this node holds to its homes, once, on a thread of its own (crumb-drain),
// which reads pages from the SSD one at a time. The cluster owns it and starts it on DrainNode. A
// page that cannot be read within 5 s is counted as unread, and stays here. Thread-safe.
//
//   idle --Start--> every page is offered --> every offer has a response --> `drained` is called
class Drain {
 public:
  // The references must outlive this.
  Drain(storage::TieredStore& store, const KeyspaceRegistry& keyspaces, Pusher& pusher,
        const Clock& clock)
      : store_(store), keyspaces_(keyspaces), pusher_(pusher), clock_(clock) {}
  ~Drain() { Stop(); }

  // Starts the drain. Does nothing if it was started or stopped before. `drained` is called on the
  // drain's thread once every offer has a response, but not if Stop comes first.
  void Start(std::function<void()> drained);
  // Ends the thread, after the page that it is reading. Idempotent.
  void Stop();

  // Pages that were not offered yet, and offers without a response yet.
  uint64_t pages_left() const { return left_.load() + pusher_.pending(); }

 private:
  // The thread.
  void Run(const std::function<void()>& drained);
  // Leases a page for a moment and offers its fragments. Returns false if it could not be read
  // whole.
  bool OfferPage(const Keyspace& keyspace, const PageKey& key);
  // Waits for `most`. Returns false if the drain is stopping.
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
