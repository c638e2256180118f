// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <climits>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/arena_pinner.h"
#include "client/gpu/device/background.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/device_geometry.h"
#include "client/gpu/pools/slot_pool.h"
#include "client/worker/deferred_checksums.h"
#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "client/worker/page_intake.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace crumb::client {

// Events and tables of one load at a time.
struct LoadLane {
  std::vector<OwnedEvent> layer_done;
  OwnedEvent copied;  // what was enqueued last on the stream of copies
  OwnedEvent all_done;
  DeviceBuffer tables;   // addresses, sums, status
  PinnedBuffer staging;  // the same
};

// A fetched prefix on its way to the device. Thread-safe.
class PrefixLoad {
 public:
  PrefixLoad(Device& device, LoadLane& lane) : device_(device), lane_(lane) {}

  // Makes `stream` wait until the pages' tiles of `layer` are there and checked. Blocks until they
  // are enqueued, milliseconds at most.
  absl::Status MakeWait(DeviceStream stream, int layer) const;
  // Makes `stream` wait for all of them.
  absl::Status MakeWaitAll(DeviceStream stream) const;
  bool done() const { return done_.load(); }
  // Blocks until all pages are there and answers which page of the sequence cannot be attended: the
  // first that was damaged on its way, or whose sums did not come, or -1.
  int Settle() const;
  // Of a page that Settle answered: whether it was looked at.
  bool checked(int place) const;

 private:
  friend class PrefixLoader;

  // Places of all its pages in their sequence, ascending.
  void NotePlaces(std::vector<int> places);
  void NoteEnqueued(int layers, absl::Status status);
  // Pages from `place` on cannot be checked.
  void NoteUnchecked(int place);
  absl::Status AwaitEnqueued(int layers) const;

  Device& device_;
  LoadLane& lane_;  // another load's when this one is done
  mutable std::atomic<bool> done_{false};
  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::vector<int> places_ ABSL_GUARDED_BY(mutex_);
  int enqueued_ ABSL_GUARDED_BY(mutex_) = 0;  // layers
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  mutable int damaged_ ABSL_GUARDED_BY(mutex_) = -1;
  int unchecked_ ABSL_GUARDED_BY(mutex_) = INT_MAX;  // place of the first such page
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
    SlotPool& bf16_pages;
    SlotPool& sinks;
    Background& background;  // sees loads off; ends before the loader
    ArenaPinner& pinner;
    std::function<void()> damaged;                       // called for each load with a damaged page
    std::function<void(const absl::Status&)> unchecked;  // and where sums did not come
    // Called with the sound pages of each load.
    std::function<void(const Keyspace&, std::vector<std::shared_ptr<const Page>>)> loaded;
    bool keeps_sums = false;  // whether `loaded` wants the pages' sums
    Duration slots_timeout;   // of asking crumbd for shared slots
  };
  // `loads` at once, of `pages_max` pages each; `kernel_layers` as
  // DeviceWorkerOptions::load_kernel_layers.
  static absl::StatusOr<std::unique_ptr<PrefixLoader>> Create(const Parts& parts, int loads,
                                                              int pages_max, int kernel_layers);

  // A prefix of `pages_max` pages at most, as PageIntake has it. Pages that are placed stay where
  // they are. The first layer of each part is enqueued at once. Blocks for no copy of pinned
  // memory.
  std::unique_ptr<PageIntake::Prefix> NewPrefix(Keyspace keyspace, int pages_max);

 private:
  using Pages = std::vector<std::shared_ptr<Page>>;

  class Incoming;
  // What the device is told of a load: in the lane's pinned memory and in the device's.
  struct Tables {
    uint32_t* status = nullptr;      // [capacity] of pages
    uint64_t* from = nullptr;        // [capacity] of the first layer
    uint64_t* to = nullptr;          // [capacity]
    int64_t* from_stride = nullptr;  // [capacity] of layers
    uint32_t* sums = nullptr;        // [layers, capacity, kv_heads]
    size_t bytes = 0;
  };
  // A load while it is enqueued. The sink comes first, if it is in it.
  struct Job {
    std::shared_ptr<PrefixLoad> load;
    std::shared_ptr<const PinnedArena> arena;
    Keyspace keyspace;
    Pages from;
    Pages to;
    std::vector<char> copied;  // pages that the kernel cannot read where they are
    bool any_copied = false;
    bool all_in_pools = true;  // other devices' memory
    int kernel_layers = 0;
    std::vector<std::shared_ptr<DeferredChecksums>> deferred_checksums;  // of pages, in their order
    int capacity = 0;                                                    // of pages

    int pages() const { return static_cast<int>(to.size()); }
    int sinks() const { return to.front()->position == 0 ? 1 : 0; }
    LoadLane& lane() const { return load->lane_; }
  };
  // Who sums tiles: the kernel that brings them, or one behind the copies.
  enum class Check { kOnTheWay, kInPlace };

  PrefixLoader(const Parts& parts, int pages_max, int kernel_layers)
      : parts_(parts),
        pages_max_(pages_max),
        kernel_layers_(kernel_layers),
        enqueuer_("crumb-load") {}
  LoadLane* TakeLane();
  void GiveBack(LoadLane* lane);
  std::shared_ptr<Job> NewJob(const Keyspace& keyspace, int capacity);
  // Adds pages and enqueues their first layer; answers those that there was room for.
  absl::StatusOr<Pages> Add(Job& job, const Pages& from);
  // Those that pages from `page_begin` on lack, while the next part is looked for.
  void RequestChecksums(Job& job, int page_begin);
  // The job's last part was added.
  void Complete(std::shared_ptr<Job> job);
  absl::StatusOr<Pages> Place(const Pages& from);
  void LookAtSources(Job& job, int page_begin) const;
  absl::Status EnqueuePart(const Job& job, int page_begin);
  absl::Status EnqueueKernelLayers(const Job& job, int layer_begin, int layer_end);
  void EnqueueRest(const Job& job);
  absl::Status EnqueueBehindSums(const Job& job);
  void AwaitSums(const Job& job) const;
  absl::Status EnqueueGroups(const Job& job);
  absl::Status EnqueueEnd(const Job& job);
  // Pages from `page_begin` on, and their first layer's sums.
  absl::Status SendPlaces(const Job& job, int page_begin);
  absl::Status SendSums(const Job& job, int layer_begin, int layer_end);
  void GatherSums(const Job& job, int page_begin, int layer_begin, int layer_end) const;
  absl::Status BringByKernel(const Job& job, int page_begin, int page_end, int layer_begin,
                             int layer_end);
  absl::Status BringByCopies(const Job& job, int layer_begin, int layer_end);
  absl::Status Fetch(const Job& job, Check check, int page_begin, int page_end, int layer_begin,
                     int layer_end);
  absl::Status FollowCopies(const Job& job);
  void Drain(const Job& job);
  void FinishInBackground(std::shared_ptr<const Job> job);
  Tables TablesAt(uint64_t base, int capacity) const;

  const Parts parts_;
  const int pages_max_;
  const int kernel_layers_;
  OwnedStream stream_;        // what brings tiles
  OwnedStream check_stream_;  // what looks at copied ones
  std::vector<std::unique_ptr<LoadLane>> lanes_;

  Mutex mutex_;
  std::vector<LoadLane*> idle_ ABSL_GUARDED_BY(mutex_);
  Mutex enqueue_mutex_;  // one thread at a time on the streams
  Background enqueuer_;  // of what follows the first layers
};

}  // namespace crumb::client
