// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "server/metrics/server_metrics.h"
#include "storage/store_stats.h"

namespace crumb::server {

// A counter that has no labels, as it is exported: on the admin port and in the response to Stats.
struct NamedCounter {
  const char* name;  // full name with prefix and suffix: crumb_..._total
  const char* help;
  uint64_t value;
};

// Returns all counters without labels, of the server and of the store.
std::vector<NamedCounter> UnlabelledCounters(const ServerMetrics& metrics,
                                             const storage::StoreStats& stats);

}  // namespace crumb::server
