// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/quality_watch.h"

#include <numeric>

namespace crumb::client {

std::optional<int> QualityWatch::NextSample() {
  if (!enabled()) return std::nullopt;
  const uint64_t window = windows_.fetch_add(1, std::memory_order_relaxed);
  if (window % options_.watch_every != 0) return std::nullopt;
  return static_cast<int>(window / options_.watch_every % options_.own_kv_heads());
}

void QualityWatch::Record(std::span<const QualitySample> layers) {
  if (layers.empty()) return;
  double error = 0.0;
  for (const QualitySample& sample : layers) error += sample.attention_error;
  const double bound = this->bound();
  double mean = 0.0;
  {
    MutexLock lock(&mutex_);
    errors_.push_back(error / static_cast<double>(layers.size()));
    const size_t wanted = static_cast<size_t>(options_.watch_windows);
    if (errors_.size() > wanted) errors_.pop_front();
    if (bound <= 0.0 || errors_.size() < wanted) return;
    mean = std::accumulate(errors_.begin(), errors_.end(), 0.0) / static_cast<double>(wanted);
    if (mean <= bound) return;
    errors_.clear();  // the next alarm needs as many windows again
  }
  alarm_(mean);
}

}  // namespace crumb::client
