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

// The passes over one stream, numbered from 1 on, so that others can tell when a pass has run.
// Thread-safe; passes are begun and ended by one thread at a time.
class Timeline {
 public:
  // At most `in_flight_max` passes are queued on the stream. `device` is borrowed.
  static absl::StatusOr<std::shared_ptr<Timeline>> Create(Device& device, DeviceStream stream,
                                                          int in_flight_max);

  // Answers the new pass's number. Blocks while in_flight_max passes are queued: what the host kept
  // for pass number - in_flight_max may be used again.
  absl::StatusOr<uint64_t> BeginPass();
  // Ends the pass that was begun: its work is all that was enqueued since.
  absl::Status EndPass();

  // The last pass that was begun: work enqueued until now is done when it is.
  uint64_t latest() const;
  // Whether the pass has ended on the host: from then on it can be waited for.
  bool Ended(uint64_t pass) const;
  // Makes `stream` wait for the pass. False: it has not ended on the host yet, so nothing can.
  absl::StatusOr<bool> MakeWait(DeviceStream stream, uint64_t pass);
  // Blocks until the pass has run. It must have ended on the host.
  absl::Status Synchronize(uint64_t pass);

  DeviceStream stream() const { return stream_; }

 private:
  Timeline(Device& device, DeviceStream stream) : device_(device), stream_(stream) {}
  DeviceEvent EventOf(uint64_t pass) const { return events_[pass % events_.size()].get(); }

  Device& device_;
  const DeviceStream stream_;
  std::vector<OwnedEvent> events_;  // of the latest passes
  mutable Mutex mutex_;
  uint64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A pass of a timeline: work that others may have to wait for.
struct PassRef {
  std::shared_ptr<Timeline> timeline;  // null: nothing to wait for
  uint64_t pass = 0;
};

// All timelines of a worker. Thread-safe.
class TimelineSet {
 public:
  void Add(const std::shared_ptr<Timeline>& timeline);
  // What may still use memory that is given up now.
  std::vector<PassRef> Now() const;

 private:
  mutable Mutex mutex_;
  mutable std::vector<std::weak_ptr<Timeline>> timelines_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::client
