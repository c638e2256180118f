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
#include "client/gpu/prefix_load.h"
#include "client/worker/deferred_checksums.h"
#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "client/worker/page_intake.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace crumb::client {

// PrefixLoader copies pages from crumbd's memory and from peers to device slots, layer by layer on
// a stream of its own, and verifies the tiles' checksums there. Thread-safe.
//
// Sources: pinned slabs of crumbd are read by the kernel or copied asynchronously; memory that is
// not pinned is copied by the engine, slower; peers' pools are mapped device memory. The first
// kernel_layers layers arrive by a kernel that verifies while it copies, because attention of layer
// 0 waits for them; the others by copy engines, verified behind the copies, so that they take no
// SMs from the model.
//
// `loads` lanes bound the loads in flight; a prefix for which no lane or slot is free has no pages,
// and the engine computes them.
//
//   NewPrefix --Take, per part--> first layer enqueued --destroyed--> kernel layers, then groups of
//   layers by copy engines (thread crumb-load) --> statuses read, pages reported (crumb-settle)
class PrefixLoader final : public PageIntake {
 public:
  using Keyspace = std::shared_ptr<const KeyspaceBinding>;

  struct Parts {
    Device& device;
    const DeviceGeometry& geometry;
    SlotPool& pages;
    SlotPool& bf16_pages;
    SlotPool& sinks;
    Background& background;  // completes loads; REQUIRES: it is destroyed before the loader
    ArenaPinner& pinner;
    // Provides the slots that sequences in a keyspace need; without them no page is loaded.
    std::function<absl::Status(const KeyspaceBinding&)> provide;
    std::function<void()> damaged;  // called for each load with a damaged page
    // called for each load whose checksums did not arrive
    std::function<void(const absl::Status&)> unchecked;
    // Called with the undamaged pages of each load.
    std::function<void(const Keyspace&, std::vector<std::shared_ptr<const Page>>)> loaded;
    bool keeps_sums = false;  // `loaded` needs the pages' checksums
    Duration slots_timeout;   // limit of requests of pool slots
  };
  // Allows `loads` loads at once, of up to `pages_max` pages each. `kernel_layers` as in
  // DeviceWorkerOptions::load_kernel_layers.
  static absl::StatusOr<std::unique_ptr<PrefixLoader>> Create(const Parts& parts, int loads,
                                                              int pages_max, int kernel_layers);

  // Starts a prefix of up to `pages_max` pages: see PageIntake. Placed pages stay where they are.
  // The first layer of each part is enqueued at once. Does not block on copies of pinned memory.
  std::unique_ptr<Prefix> NewPrefix(const Keyspace& keyspace, int pages_max) override;

 private:
  using Pages = std::vector<std::shared_ptr<Page>>;

  class Incoming;
  // The tables of a load, with the same layout in the lane's pinned memory and in device memory.
  struct Tables {
    uint32_t* status = nullptr;      // [capacity], one per page
    uint64_t* from = nullptr;        // [capacity], address of the first layer
    uint64_t* to = nullptr;          // [capacity]
    int64_t* from_stride = nullptr;  // [capacity], bytes between layers
    uint32_t* sums = nullptr;        // [layers, capacity, kv_heads]
    size_t bytes = 0;
  };
  // A load while it is being enqueued. The sink, if it is part of it, comes first.
  struct Job {
    std::shared_ptr<PrefixLoad> load;
    std::shared_ptr<const PinnedArena> arena;
    Keyspace keyspace;
    Pages from;
    Pages to;
    std::vector<char> copied;  // pages that the kernel cannot read in place
    bool any_copied = false;
    bool all_in_pools = true;  // all pages lie in other devices' memory
    int kernel_layers = 0;
    std::vector<std::shared_ptr<DeferredChecksums>> deferred_checksums;  // per page
    int capacity = 0;                                                    // number of pages

    int pages() const { return static_cast<int>(to.size()); }
    int sinks() const { return to.front()->position == 0 ? 1 : 0; }
    LoadLane& lane() const { return load->lane(); }
  };
  // Check says when a tile's checksum is computed: by the kernel that copies it, or by one behind
  // the copies.
  enum class Check { kWhileCopying, kAfterCopying };

  PrefixLoader(const Parts& parts, int pages_max, int kernel_layers)
      : parts_(parts),
        pages_max_(pages_max),
        kernel_layers_(kernel_layers),
        enqueuer_("crumb-load") {}
  // Returns a lane for the next load.
  void GiveBack(LoadLane* lane);
  // Begins a load in an idle lane; null: there is none.
  std::shared_ptr<Job> NewJob(const Keyspace& keyspace, int capacity);
  // Adds pages, enqueues their first layer, and returns those for which there was room.
  absl::StatusOr<Pages> Add(Job& job, const Pages& from);
  // Requests the checksums that pages from `page_begin` on lack, while the next part is acquired.
  void RequestChecksums(Job& job, int page_begin);
  // Completes the job after its last part was added.
  void Complete(std::shared_ptr<Job> job);
  // Returns pages in device slots for the leading pages of `from`, as many as there are slots.
  absl::StatusOr<Pages> AssignSlots(const Pages& from);
  // Decides for each page from `page_begin` on whether the kernel can read its source.
  void FindCopiedSources(Job& job, int page_begin) const;
  // Enqueues the tables and the first layer of a part.
  absl::Status EnqueuePart(const Job& job, int page_begin);
  absl::Status EnqueueKernelLayers(const Job& job, int layer_begin, int layer_end);
  // Enqueues all that is left of a load, on the thread crumb-load, and notes the end or the error.
  void EnqueueRest(const Job& job);
  // Waits for checksums that come late, if there are any, and enqueues the layers that need them.
  absl::Status EnqueueBehindChecksums(const Job& job);
  // Waits for these checksums. Pages without them count as damaged.
  void AwaitChecksums(const Job& job) const;
  // Enqueues the remaining layers as groups of copies, each three times as large as the layers
  // before it, and their checks behind them.
  absl::Status EnqueueGroups(const Job& job);
  // Enqueues the copy of the status words to the host, behind all checks.
  absl::Status EnqueueEnd(const Job& job);
  // Copies the tables of pages from `page_begin` on, and the checksums of their first layer, to the
  // device.
  absl::Status SendTables(const Job& job, int page_begin);
  absl::Status SendChecksums(const Job& job, int layer_begin, int layer_end);
  void GatherChecksums(const Job& job, int page_begin, int layer_begin, int layer_end) const;
  // Enqueue copies of tiles of these pages and layers, by the fetch kernel or by copy engines.
  absl::Status CopyByKernel(const Job& job, int page_begin, int page_end, int layer_begin,
                            int layer_end);
  absl::Status CopyByEngine(const Job& job, int layer_begin, int layer_end);
  // Launches the fetch kernel, which copies and checks, or only checks.
  absl::Status Fetch(const Job& job, Check check, int page_begin, int page_end, int layer_begin,
                     int layer_end);
  // Makes the checking stream wait for the copies enqueued so far.
  absl::Status WaitForCopies(const Job& job);
  // Blocks until copies to slots that are about to be released are done.
  void Drain(const Job& job);
  // Reads the results on the background thread, reports the pages and returns the lane. It holds
  // crumbd's memory and the slots until then.
  void FinishInBackground(std::shared_ptr<const Job> job);
  // Returns the addresses of the tables in memory at `base`.
  Tables TablesAt(uint64_t base, int capacity) const;

  const Parts parts_;
  const int pages_max_;
  const int kernel_layers_;
  OwnedStream stream_;        // copies tiles
  OwnedStream check_stream_;  // checks copied tiles
  std::vector<std::unique_ptr<LoadLane>> lanes_;

  Mutex mutex_;
  std::vector<LoadLane*> idle_ ABSL_GUARDED_BY(mutex_);
  Mutex enqueue_mutex_;  // held while enqueueing on the streams
  Background enqueuer_;  // enqueues the layers behind the first
};

}  // namespace crumb::client
