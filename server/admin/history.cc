// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/history.h"

#include <algorithm>
#include <utility>

namespace crumb::server {

History::History(const Options& options, std::function<HistorySample()> take)
    : options_(options), take_(std::move(take)) {
  Add(take_());
  thread_ = Thread("crumb-history", [this] { Run(); });
}

History::~History() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  stopping_.NotifyAll();
  thread_.Join();
}

std::vector<HistorySample> History::Samples() const {
  MutexLock lock(&mutex_);
  return {samples_.begin(), samples_.end()};
}

void History::Add(const HistorySample& sample) {
  MutexLock lock(&mutex_);
  if (samples_.size() == options_.samples_max) samples_.pop_front();
  samples_.push_back(sample);
}

void History::Run() {
  for (TimePoint next = Clock::Real().Now() + options_.interval;; next += options_.interval) {
    {
      MutexLock lock(&mutex_);
      while (!stop_ && Clock::Real().Now() < next) stopping_.WaitUntil(&mutex_, next);
      if (stop_) return;
    }
    Add(take_());
    next =
        std::max(next, Clock::Real().Now() - options_.interval);  // after a suspend: no catching up
  }
}

}  // namespace crumb::server
