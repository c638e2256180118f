// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/server_metrics.h"

namespace crumb::server {

const char* StageName(Stage stage) {
  static constexpr const char* kNames[kStageCount] = {"acquire_store", "commit_queue",
                                                      "commit_store", "control_queue", "flush"};
  return kNames[static_cast<size_t>(stage)];
}

const char* RejectionName(Rejection reason) {
  static constexpr const char* kNames[kRejectionCount] = {
      "requests",          "commit_queue", "control_queue",  "get_streams",  "put_streams",
      "watchers",          "sessions",     "staging",        "lease_budget", "slab_grant",
      "device_sums",       "device_pools", "device_handles", "device_slots", "prefetches",
      "held_memory",       "keyspaces",    "device_tenant",  "connections",  "responses",
      "unread_descriptors"};
  return kNames[static_cast<size_t>(reason)];
}

const char* RefusalName(Refusal reason) {
  static constexpr const char* kNames[kRefusalCount] = {"checksum", "invalid", "non_finite",
                                                        "no_room", "quota"};
  return kNames[static_cast<size_t>(reason)];
}

StageMetrics::StageMetrics() {
  for (int i = 0; i < kStageCount; ++i) stages_.emplace_back(LatencyBounds());
}

}  // namespace crumb::server
