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
  virtual void Stop(const absl::Status& why) = 0;
};

// The long streams of a service, so that stopping need not wait for their callers. Thread-safe.
class StreamRegistry {
 public:
  // False: stopped already.
  bool Add(const std::shared_ptr<LongStream>& stream);
  void Stop(const absl::Status& why);

 private:
  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<LongStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
