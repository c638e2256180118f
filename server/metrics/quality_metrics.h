// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>

#include "common/metrics.h"

namespace crumb::server {

// Errors of evicted windows as clients measured them. Thread-safe; lives as long as the daemon.
class QualityMetrics {
 public:
  // Layers with a series of their own; deeper ones share the last.
  static constexpr size_t kLayersMax = 128;

  QualityMetrics();

  // Values that are no ratio (negative, not finite) are left out.
  void Observe(size_t layer, double attention_error, double key_error, double value_error);
  // Makes series for the layers of a model that is served.
  void Cover(size_t layers);

  size_t layers() const { return layers_.load(std::memory_order_acquire); }
  const Histogram& attention_error(size_t layer) const { return attention_error_[layer]; }
  const Histogram& key_error() const { return key_error_; }
  const Histogram& value_error() const { return value_error_; }

 private:
  Histogram key_error_;
  Histogram value_error_;
  std::deque<Histogram> attention_error_;  // kLayersMax
  std::atomic<size_t> layers_{1};
};

}  // namespace crumb::server
