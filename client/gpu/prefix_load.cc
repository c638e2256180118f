// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/prefix_load.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<LoadLane>> LoadLane::Create(Device& device, int layers,
                                                           size_t table_bytes) {
  auto lane = std::make_unique<LoadLane>();
  for (int layer = 0; layer < layers; ++layer) {
    CRUMB_ASSIGN_OR_RETURN(OwnedEvent event, NewEvent(device));
    lane->layer_done.push_back(std::move(event));
  }
  CRUMB_ASSIGN_OR_RETURN(lane->copied, NewEvent(device));
  CRUMB_ASSIGN_OR_RETURN(lane->all_done, NewEvent(device));
  CRUMB_ASSIGN_OR_RETURN(lane->tables, NewDeviceBuffer(device, table_bytes));
  CRUMB_ASSIGN_OR_RETURN(lane->staging, NewPinnedBuffer(device, table_bytes));
  return lane;
}

void PrefixLoad::NoteIndices(std::vector<int> indices) {
  MutexLock lock(&mutex_);
  indices_ = std::move(indices);
}

void PrefixLoad::NoteEnqueued(int layers, absl::Status status) {
  MutexLock lock(&mutex_);
  enqueued_ = layers;
  status_ = std::move(status);
  changed_.NotifyAll();
}

void PrefixLoad::NoteUnchecked(int index) {
  MutexLock lock(&mutex_);
  unchecked_ = std::min(unchecked_, index);
}

bool PrefixLoad::checked(int index) const {
  MutexLock lock(&mutex_);
  return index < unchecked_;
}

absl::Status PrefixLoad::AwaitEnqueued(int layers) const {
  MutexLock lock(&mutex_);
  while (status_.ok() && enqueued_ < layers) changed_.Wait(&mutex_);
  return status_;
}

absl::Status PrefixLoad::MakeWait(DeviceStream stream, int layer) const {
  CRUMB_RETURN_IF_ERROR(AwaitEnqueued(layer + 1));
  if (done_.load()) return absl::OkStatus();
  return device_.Wait(stream, lane_.layer_done[layer].get());
}

absl::Status PrefixLoad::MakeWaitAll(DeviceStream stream) const {
  CRUMB_RETURN_IF_ERROR(AwaitEnqueued(kAllLayers));
  if (done_.load()) return absl::OkStatus();
  return device_.Wait(stream, lane_.all_done.get());
}

int PrefixLoad::Settle() const {
  // Another load may take the lane meanwhile, which makes the wait longer, not shorter.
  absl::Status arrived;
  if (!done_.load()) {
    arrived = AwaitEnqueued(kAllLayers);
    if (arrived.ok()) arrived = device_.Synchronize(lane_.all_done.get());
  }
  MutexLock lock(&mutex_);
  if (done_.load()) return damaged_;
  const auto* status = reinterpret_cast<const uint32_t*>(lane_.staging.get());
  for (size_t i = indices_.size(); i-- > 0;) {
    if (!arrived.ok() || status[i] != 0 || indices_[i] >= unchecked_) damaged_ = indices_[i];
  }
  done_.store(true);
  return damaged_;
}

}  // namespace crumb::client
