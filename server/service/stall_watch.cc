// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/stall_watch.h"

#include <algorithm>
#include <iterator>

namespace crumb::server {
namespace {

// A stream ends at most this part of the timeout late.
constexpr int kLooksPerTimeout = 8;

}  // namespace

StallWatch::StallWatch(Duration timeout, const Clock& clock)
    : clock_(clock),
      timeout_(timeout),
      reader_timeout_(timeout),
      thread_("crumb-stalls", [this] { Run(); }) {}

StallWatch::~StallWatch() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.Join();
}

StallWatch::Place StallWatch::Add(const std::weak_ptr<StallableStream>& stream) {
  MutexLock lock(&mutex_);
  streams_.push_back(stream);
  if (idle_) changed_.NotifyAll();
  return std::prev(streams_.end());
}

void StallWatch::Remove(Place place) {
  MutexLock lock(&mutex_);
  streams_.erase(place);
}

void StallWatch::HastenReaders(Duration timeout) {
  {
    MutexLock lock(&mutex_);
    reader_timeout_ = std::min(reader_timeout_, timeout);
    hastened_ = true;
  }
  changed_.NotifyAll();
}

int64_t StallWatch::lingering() {
  const auto streams = Streams();
  return std::count_if(streams.begin(), streams.end(),
                       [](const auto& stream) { return stream->stalled(); });
}

std::vector<std::shared_ptr<StallableStream>> StallWatch::Streams() {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<StallableStream>> alive;
  for (auto stream = streams_.begin(); stream != streams_.end();) {
    if (auto shared = stream->lock()) {
      alive.push_back(std::move(shared));
      ++stream;
    } else {
      stream = streams_.erase(stream);
    }
  }
  return alive;
}

void StallWatch::Run() {
  while (true) {
    Duration reader_timeout;
    {
      MutexLock lock(&mutex_);
      idle_ = true;
      while (!stopping_ && streams_.empty()) changed_.Wait(&mutex_);
      idle_ = false;
      const TimePoint next = Clock::Real().Now() + reader_timeout_ / kLooksPerTimeout;
      while (!stopping_ && !hastened_ && changed_.WaitUntil(&mutex_, next)) {
      }
      if (stopping_) return;
      hastened_ = false;
      reader_timeout = reader_timeout_;
    }
    const TimePoint now = clock_.Now();
    for (const auto& stream : Streams()) {
      const Duration timeout = stream->WaitsForReader() ? reader_timeout : timeout_;
      if (stream->Claim(now - timeout)) stream->Stalled();
    }
  }
}

}  // namespace crumb::server
