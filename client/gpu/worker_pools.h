// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/device.h"
#include "client/gpu/device/device_memory.h"
#include "client/gpu/device_geometry.h"
#include "client/gpu/pools/device_pool.h"
#include "client/gpu/pools/slot_pool.h"
#include "client/worker/shared_pages.h"
#include "crumb/acquire.h"
#include "crumb/device_options.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// WorkerPools has the device pools in which a GPU worker takes part: one of INT2 pages and one of
// sinks on its own device, and those of peers, from which it copies. Thread-safe.
//
// Pools are joined by their own threads, without waiting: a worker starts with private slots if
// crumbd is absent. Pages that this rank can attend in place are adopted; pages of peers, and of
// fragments with other heads in the own pool, are held and copied by PrefixLoader.
class WorkerPools final : public SharedPages {
 public:
  // Everything is borrowed; `pages` and `sinks` adopt slots of the own device's pools.
  // kInvalidArgument: an option is wrong; kFailedPrecondition, kUnavailable: the device's memory
  // cannot be passed to other processes, or a peer cannot be reached.
  static absl::StatusOr<std::unique_ptr<WorkerPools>> Open(const WorkerOptions& options,
                                                           const DeviceWorkerOptions& pools,
                                                           const DeviceGeometry& geometry,
                                                           Device& device, Client& client,
                                                           SlotPool& pages, SlotPool& sinks);

  // Return the pools of the own device.
  DevicePool& pages() const { return *own_.pages; }
  DevicePool& sinks() const { return *own_.sinks; }

  void NamePools(AcquireRequest* request) const override;
  HeldPages Hold(std::span<const DeviceFragment* const> fragments,
                 const std::shared_ptr<const Lease>& lease) override;

  // A page in a pool of the own device.
  struct PoolPage {
    PageKey key;
    kernels::PageFormat format = kernels::PageFormat::kInt2;
    uint64_t slot = 0;
  };
  // Returns the place of a page. REQUIRES: Has(page).
  static PoolPage PoolPageOf(const Page& page);
  // Returns the checksums that crumbd has for this rank's tiles of these pages; empty for a page
  // that crumbd does not know. They stay valid as long as the pages are held. Returns errors of
  // crumbd's calls.
  absl::StatusOr<std::vector<std::vector<uint32_t>>> SumsOf(std::span<const PoolPage> places,
                                                            Duration timeout) const;
  // Makes crumbd withdraw the page, which must be held.
  absl::Status Withdraw(const PoolPage& place, Duration timeout) const;

  // Returns whether the page lies in a pool of the own device.
  bool Has(const Page& page) const override;
  bool copies() const override { return copies_; }
  absl::StatusOr<std::vector<CommitOutcome>> Commit(
      const KeyspaceId& keyspace, std::span<const std::shared_ptr<const Page>> pages,
      std::span<const FragmentHeader> headers, Duration timeout) override;

 private:
  // The pools of one device: INT2 pages, and BF16 sinks.
  struct Pair {
    std::unique_ptr<DeviceMemory> memory;
    std::unique_ptr<DevicePool> pages, sinks;
  };

  WorkerPools(const WorkerOptions& options, const DeviceGeometry& geometry,
              const DeviceWorkerOptions& pools, SlotPool& pages, SlotPool& sinks)
      : options_(options),
        geometry_(geometry),
        page_slots_(pages),
        sink_slots_(sinks),
        first_layers_(std::max(1, pools.load_kernel_layers)),
        copies_(pools.pool_write_through) {}
  // Opens the pools of a device. A peer's pools are only read: no memory is added and no slot
  // reserved.
  absl::StatusOr<Pair> OpenPair(const DeviceWorkerOptions& pools,
                                std::unique_ptr<DeviceMemory> memory, Client& client,
                                bool peer) const;
  using Fragments = std::span<const DeviceFragment* const>;

  static DevicePool& PoolOf(const Pair& pair, kernels::PageFormat format) {
    return format == kernels::PageFormat::kBf16 ? *pair.sinks : *pair.pages;
  }
  static DevicePool& PoolOf(const Pair& pair, const FragmentHeader& header) {
    return PoolOf(pair, header.format);
  }
  // Withdraws pages that were found damaged while they were being committed.
  absl::Status WithdrawDamaged(std::span<const std::shared_ptr<const Page>> pages,
                               Duration timeout) const;
  // Returns the tiles of the layers that are copied before all checksums have arrived.
  TileRange FirstSums() const;
  // Returns how many leading fragments lie in one of the own pools and can be attended in place.
  size_t OwnRun(Fragments fragments) const;
  // Holds leading fragments of one pool that have to be copied, and adds their pages to `held`.
  absl::Status HoldElsewhere(Fragments fragments, const std::shared_ptr<const Lease>& lease,
                             std::vector<std::shared_ptr<Page>>* held) const;
  // Describes a fragment as a page, as the loader reads it.
  void FillForCopy(const DeviceFragment& fragment, const std::shared_ptr<const DeviceSlot>& slot,
                   Page& page) const;

  const WorkerOptions& options_;
  const DeviceGeometry& geometry_;
  SlotPool& page_slots_;
  SlotPool& sink_slots_;
  const int first_layers_;
  const bool copies_;
  Pair own_;
  std::vector<Pair> peers_;
};

}  // namespace crumb::client
