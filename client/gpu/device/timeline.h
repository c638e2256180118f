// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/owned.h"
#include "common/mutex.h"

namespace crumb::client {

// Timeline numbers the passes over one stream, from 1 on, so that other streams and threads can
// wait for a pass. Thread-safe, but one thread at a time begins and ends passes.
//
// A pass is begun (its work may be enqueued), ended (all of its work is enqueued), or done (the
// device has run it).
class Timeline {
 public:
  // `device` is borrowed. At most `in_flight_max` passes are queued on the stream.
  static absl::StatusOr<std::shared_ptr<Timeline>> Create(Device& device, DeviceStream stream,
                                                          int in_flight_max);

  // Begins a pass and returns its number. Blocks while in_flight_max passes are queued; afterwards
  // host memory of pass number - in_flight_max may be reused.
  absl::StatusOr<uint64_t> BeginPass();
  // Ends the pass, which consists of the work enqueued since BeginPass.
  absl::Status EndPass();

  // Returns the last pass that was begun. Work enqueued so far is done when that pass is.
  uint64_t latest() const;
  // Returns whether the pass has ended, so that it can be waited for.
  bool Ended(uint64_t pass) const;
  // Makes `stream` wait for the pass. Returns false, without effect, if the pass has not ended.
  absl::StatusOr<bool> MakeWait(DeviceStream stream, uint64_t pass);
  // Blocks until the pass is done. REQUIRES: it has ended.
  absl::Status Synchronize(uint64_t pass);

  DeviceStream stream() const { return stream_; }

 private:
  Timeline(Device& device, DeviceStream stream) : device_(device), stream_(stream) {}
  DeviceEvent EventOf(uint64_t pass) const { return events_[pass % events_.size()].get(); }

  Device& device_;
  const DeviceStream stream_;
  std::vector<OwnedEvent> events_;  // events of the latest passes
  mutable Mutex mutex_;
  uint64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
};

// PassRef refers to a pass of a timeline that other work may have to wait for.
struct PassRef {
  std::shared_ptr<Timeline> timeline;  // null: there is nothing to wait for
  uint64_t pass = 0;
};

// TimelineSet has all timelines of a worker. Thread-safe.
class TimelineSet {
 public:
  // Adds a timeline as long as it lives.
  void Add(const std::shared_ptr<Timeline>& timeline);
  // Returns the latest pass of every timeline: the passes that may still use memory released now.
  std::vector<PassRef> Now() const;

 private:
  mutable Mutex mutex_;
  mutable std::vector<std::weak_ptr<Timeline>> timelines_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::client
