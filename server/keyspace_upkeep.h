// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "server/keyspace_registry.h"
#include "server/metrics/server_metrics.h"

namespace crumb::server {

// Ends keyspaces that are unused (KeyspaceRegistry::EndUnused), so that opening keyspaces does not
// use up limits.keyspaces_max for ever. Owns the thread crumb-keyspaces, which looks every
// sixteenth of the time after which a keyspace is unused, at most once a second and at least once
// an hour, and sleeps in between.
class KeyspaceUpkeep {
 public:
  // The references must outlive this.
  KeyspaceUpkeep(KeyspaceRegistry& keyspaces, ServerMetrics& metrics, Duration idle_max,
                 bool in_cluster);
  ~KeyspaceUpkeep();

 private:
  void Run();

  KeyspaceRegistry& keyspaces_;
  ServerMetrics& metrics_;
  const Duration idle_max_;
  const bool in_cluster_;
  Mutex mutex_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::server
