// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/keyspace_upkeep.h"

#include <algorithm>
#include <chrono>

namespace crumb::server {

KeyspaceUpkeep::KeyspaceUpkeep(KeyspaceRegistry& keyspaces, ServerMetrics& metrics,
                               Duration idle_max, bool in_cluster)
    : keyspaces_(keyspaces),
      metrics_(metrics),
      idle_max_(idle_max),
      in_cluster_(in_cluster),
      thread_("crumb-keyspaces", [this] { Run(); }) {}

KeyspaceUpkeep::~KeyspaceUpkeep() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  thread_.Join();
}

void KeyspaceUpkeep::Run() {
  const Duration interval =
      std::clamp<Duration>(idle_max_ / 16, std::chrono::seconds(1), std::chrono::hours(1));
  while (true) {
    {
      MutexLock lock(&mutex_);
      const TimePoint next = Clock::Real().Now() + interval;
      while (!stopping_ && wake_.WaitUntil(&mutex_, next)) {
      }
      if (stopping_) return;
    }
    metrics_.keyspaces_ended.Add(keyspaces_.EndUnused(
        {idle_max_, Clock::Real().Now(), std::chrono::system_clock::now(), in_cluster_}));
  }
}

}  // namespace crumb::server
