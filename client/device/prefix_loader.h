// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/device/arena_pinner.h"
#include "client/device/background.h"
#include "client/device/device_geometry.h"
#include "client/device/owned.h"
#include "client/device/slot_pool.h"
#include "client/keyspace_binding.h"
#include "client/page.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace crumb::client {

// Events and tables of one load at a time.
struct LoadLane {
  std::vector<OwnedEvent> layer_done;
  OwnedEvent all_done;
  DeviceBuffer tables;   // run addresses, sums, status
  PinnedBuffer staging;  // the same
};

// A fetched prefix on its way to the device. Thread-safe.
class PrefixLoad {
 public:
  // `pages`: places in their sequence, ascending.
  PrefixLoad(Device& device, LoadLane& lane, std::vector<int> pages)
      : device_(device), lane_(lane), pages_(std::move(pages)) {}

  // Makes `stream` wait until the pages' tiles of `layer` are there and checked.
  absl::Status MakeWait(DeviceStream stream, int layer) const;
  // Makes `stream` wait for all of them.
  absl::Status MakeWaitAll(DeviceStream stream) const;
  bool done() const { return done_.load(); }
  // Blocks until all pages are there and answers which page of the sequence was damaged on its way:
  // the first, or -1.
  int Settle() const;

 private:
  friend class PrefixLoader;

  Device& device_;
  LoadLane& lane_;  // another load's when this one is done
  const std::vector<int> pages_;
  mutable std::atomic<bool> done_{false};
  mutable Mutex mutex_;
  mutable int damaged_ ABSL_GUARDED_BY(mutex_) = -1;
};

// Copies pages from crumbd's memory and from peers into device slots, layer after layer on a stream
// of its own, and verifies the tiles' sums there. Thread-safe.
class PrefixLoader {
 public:
  using Keyspace = std::shared_ptr<const KeyspaceBinding>;

  struct Parts {
    Device& device;
    const DeviceGeometry& geometry;
    SlotPool& pages;
    SlotPool& sinks;
    Background& background;  // sees loads off; ends before the loader
    ArenaPinner& pinner;
    std::function<void()> damaged;  // called for each load with a damaged page
    // Called with the sound pages of each load.
    std::function<void(const Keyspace&, std::vector<std::shared_ptr<const Page>>)> loaded;
    Duration slots_timeout;  // of asking crumbd for shared slots
  };
  static absl::StatusOr<std::unique_ptr<PrefixLoader>> Create(const Parts& parts, int loads,
                                                              int pages_max);

  // As many leading pages as there is room for; those that are placed stay where they are. Blocks
  // for no copy.
  std::vector<std::shared_ptr<Page>> Take(const Keyspace& keyspace,
                                          std::vector<std::shared_ptr<Page>> pages);

 private:
  using Pages = std::vector<std::shared_ptr<Page>>;

  PrefixLoader(const Parts& parts, int pages_max) : parts_(parts), pages_max_(pages_max) {}
  LoadLane* TakeLane();
  void GiveBack(LoadLane* lane);
  absl::StatusOr<Pages> Load(const Keyspace& keyspace, const Pages& from);
  absl::StatusOr<Pages> Place(const Pages& from);
  absl::Status Enqueue(LoadLane& lane, const PinnedArena& arena, const Pages& from,
                       const Pages& to);
  absl::Status EnqueueLayer(LoadLane& lane, const PinnedArena& arena, int layer, const Pages& from,
                            const Pages& to);
  void SeeOff(const std::shared_ptr<PrefixLoad>& load, std::shared_ptr<const PinnedArena> arena,
              const Keyspace& keyspace, const Pages& from, const Pages& to);

  // Places inside a lane's tables, of `pages` INT2 pages.
  size_t SumsAt(int layer, int pages) const;
  size_t AddressesAt(int layer, int pages) const;
  size_t TableBytes(int pages) const;

  const Parts parts_;
  const int pages_max_;
  OwnedStream stream_;
  std::vector<std::unique_ptr<LoadLane>> lanes_;

  Mutex mutex_;  // also: one load is enqueued at a time
  std::vector<LoadLane*> idle_ ABSL_GUARDED_BY(mutex_);
  Mutex enqueue_mutex_;
};

}  // namespace crumb::client
