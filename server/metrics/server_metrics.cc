// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/server_metrics.h"

#include <algorithm>
#include <cmath>

namespace crumb::server {
namespace {

// Ratios of norms: 0.1 to 0.6 is where 2 bits live, 1 is as bad as nothing.
constexpr double kRatioBounds[] = {0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0, 1.5};

// Clients send these: without a bound one sample would make the sum of all samples infinite.
constexpr double kRatioMax = 1000.0;

void ObserveRatio(Histogram& histogram, double value) {
  if (std::isfinite(value) && value >= 0.0) histogram.Observe(std::min(value, kRatioMax));
}

}  // namespace

const char* StageName(Stage stage) {
  static constexpr const char* kNames[kStageCount] = {"acquire_store", "commit_queue",
                                                      "commit_store", "control_queue", "flush"};
  return kNames[static_cast<size_t>(stage)];
}

const char* RejectionName(Rejection reason) {
  static constexpr const char* kNames[kRejectionCount] = {
      "requests",           "commit_queue", "control_queue",  "get_streams",  "put_streams",
      "watchers",           "sessions",     "staging",        "lease_budget", "slab_grant",
      "device_sums",        "device_pools", "device_handles", "device_slots", "prefetches",
      "held_memory",        "keyspaces",    "device_tenant",  "connections",  "responses",
      "unread_descriptors", "large_calls",  "request_bytes"};
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

QualityMetrics::QualityMetrics() : key_error_(kRatioBounds), value_error_(kRatioBounds) {
  for (size_t layer = 0; layer < kLayersMax; ++layer) attention_error_.emplace_back(kRatioBounds);
}

void QualityMetrics::Observe(size_t layer, double attention_error, double key_error,
                             double value_error) {
  const size_t counted = std::min(layer, kLayersMax - 1);
  Cover(counted + 1);
  ObserveRatio(attention_error_[counted], attention_error);
  ObserveRatio(key_error_, key_error);
  ObserveRatio(value_error_, value_error);
}

void QualityMetrics::Cover(size_t layers) {
  const size_t wanted = std::min(layers, kLayersMax);
  size_t now = layers_.load(std::memory_order_relaxed);
  while (now < wanted && !layers_.compare_exchange_weak(now, wanted, std::memory_order_release)) {
  }
}

}  // namespace crumb::server
