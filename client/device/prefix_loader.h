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
  DeviceBuffer tables;   // addresses, sums, status
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

// Brings pages from crumbd's memory and from peers into device slots, layer after layer on a stream
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
  // `loads` at once, of `pages_max` pages each; `blocks` as DeviceWorkerOptions::load_blocks.
  static absl::StatusOr<std::unique_ptr<PrefixLoader>> Create(const Parts& parts, int loads,
                                                              int pages_max, int blocks);

  // As many leading pages as there is room for; those that are placed stay where they are. Blocks
  // for no copy of pinned memory.
  std::vector<std::shared_ptr<Page>> Take(const Keyspace& keyspace,
                                          std::vector<std::shared_ptr<Page>> pages);

 private:
  using Pages = std::vector<std::shared_ptr<Page>>;

  // What the device is told of a load: in the lane's pinned memory and in the device's.
  struct Tables {
    uint32_t* status = nullptr;      // [pages]
    uint64_t* from = nullptr;        // [pages] of the first layer
    uint64_t* to = nullptr;          // [pages]
    int64_t* from_stride = nullptr;  // [pages] of layers
    uint32_t* sums = nullptr;        // [layers, pages, kv_heads]
    size_t bytes = 0;
  };
  // A load while it is enqueued. The sink comes first, if it is in it.
  struct Job {
    LoadLane& lane;
    const PinnedArena& arena;
    const Pages& from;
    const Pages& to;
    std::vector<char> copied;  // pages that the kernel cannot read where they are
    bool any_copied = false;
    bool all_copied = true;
  };

  PrefixLoader(const Parts& parts, int pages_max, int blocks)
      : parts_(parts), pages_max_(pages_max), blocks_(blocks) {}
  LoadLane* TakeLane();
  void GiveBack(LoadLane* lane);
  absl::StatusOr<Pages> Load(const Keyspace& keyspace, const Pages& from);
  absl::StatusOr<Pages> Place(const Pages& from);
  Job MakeJob(LoadLane& lane, const PinnedArena& arena, const Pages& from, const Pages& to) const;
  absl::Status Enqueue(const Job& job);
  void FillPlaces(const Job& job) const;
  absl::Status SendSums(const Job& job, int layer_begin, int layer_end);
  absl::Status EnqueueLayers(const Job& job, int page_begin, int page_end, int layer_begin,
                             int layer_end);
  std::vector<DeviceCopy> CopiesOf(const Job& job, int page_begin, int page_end, int layer_begin,
                                   int layer_end) const;
  void SeeOff(const std::shared_ptr<PrefixLoad>& load, std::shared_ptr<const PinnedArena> arena,
              const Keyspace& keyspace, Pages from, const Pages& to);
  Tables TablesAt(uint64_t base, int pages) const;

  const Parts parts_;
  const int pages_max_;
  const int blocks_;
  OwnedStream stream_;
  std::vector<std::unique_ptr<LoadLane>> lanes_;

  Mutex mutex_;  // also: one load is enqueued at a time
  std::vector<LoadLane*> idle_ ABSL_GUARDED_BY(mutex_);
  Mutex enqueue_mutex_;
};

}  // namespace crumb::client
