// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>

#include "common/mutex.h"
#include "crumb/counters.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// Watches what 2-bit history does to attention: decides which evicted windows of a worker are
// measured, and calls the alarm when the mean over the latest ones is above the bound. Thread-safe.
class QualityWatch {
 public:
  // Called by the thread that recorded, outside any lock.
  using Alarm = std::function<void(double mean_error)>;

  // `options` is borrowed.
  QualityWatch(const WorkerOptions& options, Alarm alarm)
      : options_(options), alarm_(std::move(alarm)) {}

  double bound() const { return options_.watch_error_bound(); }  // 0: none
  bool enabled() const { return options_.watch_every > 0; }

  // Asked once for each evicted window: the KV head to measure, or nothing. KV heads take turns.
  std::optional<int> NextSample();

  // The samples of all layers of one window.
  void Record(std::span<const QualitySample> layers);

 private:
  const WorkerOptions& options_;
  const Alarm alarm_;
  std::atomic<uint64_t> windows_{0};

  Mutex mutex_;
  std::deque<double> errors_ ABSL_GUARDED_BY(mutex_);  // of the latest windows, mean over layers
};

}  // namespace crumb::client
