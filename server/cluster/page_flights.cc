// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/page_flights.h"

namespace crumb::server {

bool PageFlights::Claim(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range,
                        Landed landed) {
  MutexLock lock(&mutex_);
  const auto [flight, is_new] = waiting_.try_emplace(Name{keyspace, key, range});
  if (!is_new) flight->second.push_back(std::move(landed));
  return is_new;
}

void PageFlights::Land(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range,
                       bool arrived) {
  std::vector<Landed> waiting;
  {
    MutexLock lock(&mutex_);
    const auto found = waiting_.find(Name{keyspace, key, range});
    if (found == waiting_.end()) return;
    waiting = std::move(found->second);
    waiting_.erase(found);
  }
  for (const Landed& landed : waiting) landed(arrived);
}

}  // namespace crumb::server
