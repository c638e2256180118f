// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/stall_watch.h"

namespace crumb::server {
namespace {

// A stream ends at most this part of the timeout late.
constexpr int kLooksPerTimeout = 8;

}  // namespace

StallWatch::StallWatch(Duration timeout, const Clock& clock)
    : timeout_(timeout), clock_(clock), thread_("crumb-stalls", [this] { Run(); }) {}

StallWatch::~StallWatch() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.Join();
}

void StallWatch::Add(const std::weak_ptr<StallableStream>& stream) {
  MutexLock lock(&mutex_);
  streams_.push_back(stream);
  if (streams_.size() == 1) changed_.NotifyAll();
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
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && streams_.empty()) changed_.Wait(&mutex_);
      const TimePoint next = Clock::Real().Now() + timeout_ / kLooksPerTimeout;
      while (!stopping_ && changed_.WaitUntil(&mutex_, next)) {
      }
      if (stopping_) return;
    }
    const TimePoint since = clock_.Now() - timeout_;
    for (const auto& stream : Streams()) {
      if (stream->Claim(since)) stream->Stalled();
    }
  }
}

}  // namespace crumb::server
