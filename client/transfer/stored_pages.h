// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/cpu/cpu_backend.h"
#include "client/gpu/device/background.h"
#include "client/worker/keyspace_binder.h"
#include "client/worker/page.h"
#include "client/worker/publisher.h"
#include "client/worker/worker_tally.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// State that the loads and stores of one Transfer have in common. Everything is borrowed.
//
// They outlive every load and store, which must not outlive their Transfer.
struct TransferParts {
  const WorkerOptions& options;
  const CpuBackend& backend;
  WorkerTally& tally;
  Publisher& publisher;
  Background& settler;  // publishes pages of device caches when their copies are done
};

// Returns kOutOfRange unless [begin, end) are layers of this rank.
absl::Status CheckLayers(const WorkerOptions& options, int begin, int end);

// Counts stored pages and queues them for publishing, except those with a non-finite row.
// status[i] has the kernels::kStatus bits of pages[i].
void PublishPages(const TransferParts& parts, const KeyspaceBinder::Binding& keyspace,
                  std::vector<std::shared_ptr<Page>> pages, std::span<const uint32_t> status);

// LayersStored records which layers of a store were stored. Not thread-safe.
class LayersStored {
 public:
  explicit LayersStored(int layers) : stored_(static_cast<size_t>(layers)) {}
  // Adds layers [begin, end), which CheckLayers accepts. A layer may be added twice.
  void Add(int begin, int end);
  // Returns kFailedPrecondition unless all layers were added.
  absl::Status CheckAll() const;

 private:
  std::vector<bool> stored_;
};

}  // namespace crumb::client
