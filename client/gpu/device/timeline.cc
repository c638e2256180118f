// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device/timeline.h"

#include <utility>

#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::shared_ptr<Timeline>> Timeline::Create(Device& device, DeviceStream stream,
                                                           int in_flight_max) {
  std::shared_ptr<Timeline> timeline(new Timeline(device, stream));
  for (int i = 0; i < in_flight_max; ++i) {
    CRUMB_ASSIGN_OR_RETURN(OwnedEvent event, NewEvent(device));
    timeline->events_.push_back(std::move(event));
  }
  return timeline;
}

absl::StatusOr<uint64_t> Timeline::BeginPass() {
  uint64_t pass = 0;
  {
    MutexLock lock(&mutex_);
    pass = ended_ + 1;
  }
  if (pass > events_.size()) {
    CRUMB_RETURN_IF_ERROR(device_.Synchronize(EventOf(pass)));
  }
  MutexLock lock(&mutex_);
  begun_ = pass;
  return pass;
}

absl::Status Timeline::EndPass() {
  MutexLock lock(&mutex_);
  CRUMB_RETURN_IF_ERROR(device_.Record(EventOf(begun_), stream_));
  ended_ = begun_;
  return absl::OkStatus();
}

uint64_t Timeline::latest() const {
  MutexLock lock(&mutex_);
  return begun_;
}

bool Timeline::Ended(uint64_t pass) const {
  MutexLock lock(&mutex_);
  return pass <= ended_;
}

absl::StatusOr<bool> Timeline::MakeWait(DeviceStream stream, uint64_t pass) {
  MutexLock lock(&mutex_);
  if (pass > ended_) return false;
  // The event of an older pass belongs to a newer one by now; BeginPass has seen the older one
  // done.
  if (pass + events_.size() <= ended_) return true;
  CRUMB_RETURN_IF_ERROR(device_.Wait(stream, EventOf(pass)));
  return true;
}

absl::Status Timeline::Synchronize(uint64_t pass) {
  {
    MutexLock lock(&mutex_);
    if (pass > ended_) return absl::InternalError("a wait for a pass that has not ended");
    if (pass + events_.size() <= ended_) return absl::OkStatus();
  }
  // If a newer pass reuses the event meanwhile, this waits for that pass: longer, not shorter.
  return device_.Synchronize(EventOf(pass));
}

void TimelineSet::Add(const std::shared_ptr<Timeline>& timeline) {
  MutexLock lock(&mutex_);
  timelines_.push_back(timeline);
}

std::vector<PassRef> TimelineSet::Now() const {
  std::vector<PassRef> now;
  MutexLock lock(&mutex_);
  std::erase_if(timelines_, [](const auto& timeline) { return timeline.expired(); });
  for (const std::weak_ptr<Timeline>& weak : timelines_) {
    if (auto timeline = weak.lock()) {
      const uint64_t latest = timeline->latest();
      if (latest > 0) now.push_back({std::move(timeline), latest});
    }
  }
  return now;
}

}  // namespace crumb::client
