// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/mutex.h"

namespace crumb::server {

// A stream without an end of its own, which the registry can end.
class LongStream {
 public:
  virtual ~LongStream() = default;
  // Ends the stream with this status, after the write in progress. Thread-safe.
  virtual void Stop(const absl::Status& why) = 0;
};

// The long streams of a service (Session, WatchEvents), so that stopping need not wait for their
// callers. It holds no stream alive. Thread-safe.
class StreamRegistry {
 public:
  // Adds a stream as long as it lives. Returns false if Stop was called: the stream must end at
  // once.
  bool Add(const std::shared_ptr<LongStream>& stream);
  // Ends all streams and refuses later ones.
  void Stop(const absl::Status& why);

 private:
  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<LongStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
