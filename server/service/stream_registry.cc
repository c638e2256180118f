// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/stream_registry.h"

namespace crumb::server {

bool StreamRegistry::Add(const std::shared_ptr<LongStream>& stream) {
  MutexLock lock(&mutex_);
  if (stopped_) return false;
  std::erase_if(streams_, [](const auto& weak) { return weak.expired(); });
  streams_.push_back(stream);
  return true;
}

void StreamRegistry::Stop(const absl::Status& why) {
  std::vector<std::weak_ptr<LongStream>> streams;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    streams.swap(streams_);
  }
  for (const auto& weak : streams) {
    if (const auto stream = weak.lock()) stream->Stop(why);
  }
}

}  // namespace crumb::server
