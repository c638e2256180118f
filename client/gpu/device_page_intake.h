// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "client/gpu/device_geometry.h"
#include "client/gpu/pools/slot_pool.h"
#include "client/gpu/prefix_loader.h"
#include "client/gpu/worker_pools.h"
#include "client/worker/page_intake.h"
#include "crumb/device_options.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// DevicePageIntake is the PageIntake of GpuWorker: pages that lie in the own device's pools are
// attended in place, all others are loaded to private or pool slots. See PageIntake for the
// contract. Thread-safe.
class DevicePageIntake final : public PageIntake {
 public:
  // Everything is borrowed. `pools` is null if the worker takes part in no device pool.
  struct Parts {
    const WorkerOptions& options;
    const DeviceWorkerOptions& device_options;
    const DeviceGeometry& geometry;
    WorkerPools* pools;
    SlotPool& pages;
    SlotPool& bf16_pages;
    SlotPool& sinks;
    PrefixLoader& loader;
  };
  explicit DevicePageIntake(const Parts& parts) : parts_(parts) {}

  bool attends_in_place() const override { return parts_.pools != nullptr; }
  void NamePools(AcquireRequest* request) const override;
  HeldPages Hold(std::span<const DeviceFragment* const> fragments,
                 const std::shared_ptr<const Lease>& lease) override;
  std::unique_ptr<Prefix> NewPrefix(const std::shared_ptr<const KeyspaceBinding>& keyspace,
                                    int pages_max) override;

  // Allocates the slots of BF16 history pages if sequences in this keyspace need them and they are
  // not there yet. kResourceExhausted: there is no device memory.
  absl::Status ProvideFor(const KeyspaceBinding& keyspace);

 private:
  const Parts parts_;
};

}  // namespace crumb::client
