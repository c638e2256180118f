// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "common/mutex.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// The leases of a session's last Acquires, for callers that did not get the response: gRPC may
// count a call as done that its caller had given up. A caller numbers its Acquires and, if it gives
// one up, sends the number with its next Release; crumbd then ends the lease that the caller never
// received. Each Session has one. Bounded. Thread-safe.
//
// Finish and Abandon of one request may come in either order: the one that comes second ends the
// lease. Beyond kRequestsMax requests the oldest are forgotten, and their leases end with the
// engine.
//
//   in progress --Finish--> finished --Abandon--> the caller ends the lease
//        '------Abandon--> abandoned --Finish---> the caller ends the lease
class AcquireLedger {
 public:
  // Requests of each kind, finished and abandoned, that are remembered. Both are searched linearly.
  static constexpr size_t kRequestsMax = 1024;

  // Notes the lease of the Acquire that has number `request`; 0 means that its caller did not
  // number it, and is not noted. Returns false if the caller has given the request up already: the
  // lease must then end. Called when an Acquire's work is done, before its response is sent.
  bool Finish(uint64_t request, storage::LeaseId lease) {
    if (request == 0) return true;
    MutexLock lock(&mutex_);
    const auto given_up = std::find(abandoned_.begin(), abandoned_.end(), request);
    if (given_up != abandoned_.end()) {
      abandoned_.erase(given_up);
      return false;
    }
    if (finished_.size() == kRequestsMax) finished_.pop_front();
    finished_.emplace_back(request, lease);
    return true;
  }

  // Gives up the Acquire that has number `request`. Returns its lease, which the caller must end,
  // or 0 if the Acquire has not finished yet or had no lease.
  storage::LeaseId Abandon(uint64_t request) {
    MutexLock lock(&mutex_);
    const auto found = std::find_if(finished_.begin(), finished_.end(),
                                    [&](const auto& entry) { return entry.first == request; });
    if (found != finished_.end()) {
      const storage::LeaseId lease = found->second;
      finished_.erase(found);
      return lease;
    }
    if (abandoned_.size() == kRequestsMax) abandoned_.pop_front();
    abandoned_.push_back(request);
    return 0;
  }

 private:
  Mutex mutex_;
  // (request, lease) of finished Acquires that were not given up, oldest first.
  std::deque<std::pair<uint64_t, storage::LeaseId>> finished_ ABSL_GUARDED_BY(mutex_);
  // Abandoned requests that are not finished yet.
  std::deque<uint64_t> abandoned_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
