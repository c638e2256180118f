// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "client/gpu/device/arena_pinner.h"
#include "client/gpu/gpu_worker_parts.h"
#include "client/gpu/page_scrubber.h"
#include "client/gpu/prefix_loader.h"
#include "client/gpu/worker_pools.h"
#include "client/worker/page_reader.h"
#include "crumb/device_worker.h"

namespace crumb::client {

// GpuWorker is the DeviceWorker: see DeviceWorker for the contract.
//
// Parts, in the order of their dependence:
//     pinner, constants     crumbd's memory pinned; the model's rotations on the device
//     pools, slot pools     device memory: pages, sinks, rings
//     loader                fetched prefixes to the device    threads crumb-load, crumb-settle
//     settler               results of written pages          thread crumb-settle
//     starter               prefixes, keyspace, publishing    thread crumb-publish
//     watch, scrubber       quality, checksums                threads crumb-watch, crumb-scrub
// Each thread ends before the parts that it uses are destroyed.
class GpuWorker final : public DeviceWorker {
 public:
  ~GpuWorker() override;

  static absl::StatusOr<std::unique_ptr<GpuWorker>> Create(
      const WorkerOptions& options, const DeviceWorkerOptions& device_options, Client* client,
      Device& device);

  absl::StatusOr<std::unique_ptr<DeviceSequence>> Begin(std::span<const int32_t> tokens,
                                                        const SequenceOptions& options) override;
  absl::StatusOr<LedDeviceSequence> Lead(std::span<const int32_t> tokens,
                                         const SequenceOptions& options) override;
  absl::StatusOr<std::unique_ptr<DeviceSequence>> Follow(std::string_view token,
                                                         std::span<const int32_t> tokens,
                                                         const SequenceOptions& options) override;
  absl::StatusOr<std::unique_ptr<DeviceBatch>> NewBatch(const DeviceBatchOptions& options) override;
  absl::Status WaitPublished(Duration timeout) override;
  const WorkerOptions& options() const override { return options_; }
  WorkerCounters counters() const override { return starter_->counters(); }
  DevicePoolUse pool_use() const override;

 private:
  GpuWorker(const WorkerOptions& options, const DeviceWorkerOptions& device_options, Client* client,
            Device& device);
  // Makes the parts, in the order of their dependence. Without crumbd, or without shared memory,
  // the worker has its private slots only.
  absl::Status Allocate();
  absl::Status AllocateSlots();
  absl::Status OpenLoader();
  absl::Status JoinPools();
  absl::StatusOr<std::unique_ptr<DeviceSequence>> MakeSequence(const SequenceOptions& options,
                                                               SequenceStart start);
  absl::Status ProvideFor(const KeyspaceBinding& keyspace);
  // Called by the loader for a load whose checksums differ, on its background thread.
  void NoteDamage();
  // Called for a load whose checksums did not arrive from crumbd: its pages count as damaged, but
  // the failure is counted as late or unavailable.
  void NoteUnchecked(const absl::Status& why);
  // Called with the undamaged pages of each load; queues them to be made visible in the pool that
  // they lie in.
  void NoteLoaded(const std::shared_ptr<const KeyspaceBinding>& keyspace,
                  std::vector<std::shared_ptr<const Page>> pages);

  const WorkerOptions options_;
  const DeviceWorkerOptions device_options_;
  Client* const client_;
  Device& device_;
  const DeviceGeometry geometry_;
  const RingShape decode_ring_;
  const RingShape prompt_ring_;
  std::shared_ptr<TimelineSet> timelines_ = std::make_shared<TimelineSet>();
  std::unique_ptr<ArenaPinner> pinner_;
  std::unique_ptr<DeviceConstants> constants_;
  std::unique_ptr<WorkerPools> pools_;  // null: all slots are private
  std::unique_ptr<SlotPool> pages_, bf16_pages_, sinks_, decode_rings_, prompt_rings_;
  std::unique_ptr<EvictResults> results_;
  std::unique_ptr<PageReader> reader_;
  std::unique_ptr<PrefixLoader> loader_;
  std::unique_ptr<PageSettler> settler_;
  std::unique_ptr<SequenceStarter> starter_;  // its publisher's thread uses everything above
  std::unique_ptr<WindowWatch> watch_;        // null: quality is not watched
  std::optional<GpuWorkerParts> parts_;
  std::unique_ptr<Background> background_;  // its thread uses everything above
  // its thread uses everything above; null: there is no scrubbing
  std::unique_ptr<PageScrubber> scrubber_;
};

}  // namespace crumb::client
