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

// QualityWatch observes the errors that INT2 history causes in attention: it selects evicted
// windows of a worker for measurement, and raises the alarm when the mean error over the latest
// ones exceeds the bound. Thread-safe.
//
// Every watch_every-th window is selected, its KV heads taking turns. After an alarm the samples
// are cleared, so that the next alarm needs watch_windows measurements again. An incomplete set of
// samples never alarms.
class QualityWatch {
 public:
  // Called by the thread that called Record, outside any lock.
  using Alarm = std::function<void(double mean_error)>;

  // `options` is borrowed.
  QualityWatch(const WorkerOptions& options, Alarm alarm)
      : options_(options), alarm_(std::move(alarm)) {}

  double bound() const { return options_.watch_error_bound(); }  // 0: none
  // Returns whether windows are measured at all.
  bool enabled() const { return options_.watch_every > 0; }

  // Called once for each evicted window. Returns the KV head to measure, in rotation, or nothing.
  std::optional<int> NextSample();

  // Records the samples of all layers of one window.
  void Record(std::span<const QualitySample> layers);

 private:
  const WorkerOptions& options_;
  const Alarm alarm_;
  std::atomic<uint64_t> windows_{0};

  Mutex mutex_;
  std::deque<double> errors_ ABSL_GUARDED_BY(mutex_);  // one per window, mean over layers
};

}  // namespace crumb::client
