// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "server/base/periodic_thread.h"
#include "server/metrics/model_tokens.h"
#include "storage/store_stats.h"

namespace crumb::server {

// One point of the status page's charts.
struct HistorySample {
  TimePoint when;
  std::array<uint64_t, kTokenTierCount> lookup_tokens{};  // prompt tokens since the start
  uint64_t saved_bytes = 0;  // BF16 size of the resident tiles minus their size
};

// Returns the sample of these counters.
HistorySample SampleOf(TimePoint now, const ModelTokens& tokens, const storage::StoreStats& stats);

// Takes a sample at once and then every interval, and keeps the newest ones. Owns the thread
// crumb-history, which sleeps in between. Thread-safe. The charts of the status page need no other
// service for their last hour.
class History {
 public:
  struct Options {
    Duration interval;
    size_t samples_max;  // 2 or more
  };

  // `take` is called on the thread until this is destroyed.
  History(const Options& options, std::function<HistorySample()> take);

  // Returns the samples, oldest first; at least one.
  std::vector<HistorySample> Samples() const;

 private:
  // Adds a sample and forgets the oldest one beyond samples_max.
  void Add(const HistorySample& sample);

  const Options options_;
  const std::function<HistorySample()> take_;
  mutable Mutex mutex_;
  std::deque<HistorySample> samples_ ABSL_GUARDED_BY(mutex_);
  PeriodicThread thread_;
};

}  // namespace crumb::server
