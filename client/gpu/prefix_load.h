// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <climits>
#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/device.h"
#include "client/gpu/device/owned.h"
#include "common/mutex.h"

namespace crumb::client {

// A lane has the events and tables of one load at a time.
struct LoadLane {
  // `device` is borrowed. `table_bytes` is the size of `tables`.
  static absl::StatusOr<std::unique_ptr<LoadLane>> Create(Device& device, int layers,
                                                          size_t table_bytes);

  std::vector<OwnedEvent> layer_done;
  OwnedEvent copied;  // recorded behind the last copy
  OwnedEvent all_done;
  DeviceBuffer tables;   // addresses, checksums and status
  PinnedBuffer staging;  // pinned memory with the same layout
};

// PrefixLoad is a fetched prefix that is being copied to the device. Thread-safe.
//
// A load is enqueued layer by layer, then arrives, and is settled once Settle has read whether its
// checksums match.
//
//     enqueue layer 0 (kernel) -> enqueue groups of layers (copies) -> statuses to the host
//     -> Settle
//
// MakeWait may be called at any time: it blocks only until its layer is enqueued. Pages and
// sequences hold the load by shared_ptr; its lane is reused by another load once done() is true.
class PrefixLoad {
 public:
  // More than any number of layers: NoteEnqueued sets it when all layers and the statuses are
  // enqueued.
  static constexpr int kAllLayers = 1 << 20;

  PrefixLoad(Device& device, LoadLane& lane) : device_(device), lane_(lane) {}

  // Makes `stream` wait until the pages' tiles of `layer` are copied and checked. Blocks until they
  // are enqueued, which takes milliseconds.
  absl::Status MakeWait(DeviceStream stream, int layer) const;
  // Makes `stream` wait for all layers.
  absl::Status MakeWaitAll(DeviceStream stream) const;
  // Returns whether all pages have arrived and were checked, so that Settle does not block.
  bool done() const { return done_.load(); }
  // Blocks until all pages have arrived. Returns the index of the first page of the sequence that
  // must not be attended, because it is damaged or could not be checked, or -1.
  int Settle() const;
  // Returns whether the page that Settle returned could be checked.
  bool checked(int index) const;

  // The functions below are for PrefixLoader.

  LoadLane& lane() const { return lane_; }
  // Sets the indices of the load's pages in their sequence, in ascending order.
  void NoteIndices(std::vector<int> indices);
  void NoteEnqueued(int layers, absl::Status status);
  // Pages from index `index` on cannot be checked.
  void NoteUnchecked(int index);

 private:
  // Blocks until so many layers are enqueued. Returns the error with which enqueueing ended.
  absl::Status AwaitEnqueued(int layers) const;

  Device& device_;
  LoadLane& lane_;  // reused by another load once this one is done
  mutable std::atomic<bool> done_{false};
  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::vector<int> indices_ ABSL_GUARDED_BY(mutex_);
  int enqueued_ ABSL_GUARDED_BY(mutex_) = 0;  // number of layers
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  mutable int damaged_ ABSL_GUARDED_BY(mutex_) = -1;
  int unchecked_ ABSL_GUARDED_BY(mutex_) = INT_MAX;  // index of the first such page
};

}  // namespace crumb::client
