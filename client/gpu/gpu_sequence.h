// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "client/gpu/device_page.h"
#include "client/gpu/gpu_worker_parts.h"
#include "client/gpu/page_settler.h"
#include "client/gpu/prefix_loader.h"
#include "client/worker/keyspace_binding.h"
#include "client/worker/token_log.h"
#include "crumb/device_worker.h"
#include "crumb/sequence.h"

namespace crumb::client {

// See DeviceSequence for the contract. Holds what a sequence has in device memory; GpuBatch
// works on it.
class GpuSequence final : public DeviceSequence {
 public:
  GpuSequence(const GpuWorkerParts& parts, const SequenceOptions& options, SequenceStart start);
  // A fork: shares pages and has neither rows nor, while its sink is not full, a sink.
  GpuSequence(const GpuSequence& origin, int shared_pages);

  int length() const override { return log.length(); }
  int cached_tokens() const override { return log.hit(); }
  int pass_tokens_max() const override;
  SequenceStats stats() const override;

  // The first position whose row is attended or stored later.
  int RowsBegin() const;
  // Whether page `index` is to be published when it settles.
  bool Publishes(int index) const;
  // Adds the page behind the last one, whose tiles are about to be enqueued.
  UnsettledPage AddPage(std::shared_ptr<DevicePage> page);
  // The sink as others may have it, when its last row has been enqueued.
  UnsettledPage CompleteSink();
  // The first page that was damaged on its way from crumbd, or -1. With `wait` it is known;
  // without, what is still on its way is looked at later.
  int DamagedLoad(bool wait);
  // The first page that was found damaged where it lies, or -1.
  int DamagedPage();
  // Gives up what a finished sequence holds.
  void Release();

  const uint64_t id;  // no other sequence of the process has it
  const GpuWorkerParts& parts;
  const SequenceOptions options;
  const std::shared_ptr<const KeyspaceBinding> keyspace;
  TokenLog log;
  std::vector<std::shared_ptr<const Page>> pages;        // enqueued or loaded; the sink first
  std::shared_ptr<DevicePage> open_sink;                 // until it is full: not in `pages`
  std::shared_ptr<const SlotRef> rows;                   // null: none yet
  bool prompt_rows = false;                              // `rows` has the shape of prompt_ring
  PassRef last;                                          // the latest pass
  std::vector<std::shared_ptr<const PrefixLoad>> loads;  // not known to be sound
  std::shared_ptr<PublishLimit> line;
  std::shared_ptr<WindowSample> sample;  // for a window that leaves soon; mostly null
  bool joined = false;                   // the stream of its first pass waited for pages of others
  int fresh = 0;                         // tokens of the pass under way
  bool finished = false;

  kernels::PageFormat history_format() const { return keyspace->history_format; }
  const RingShape& ring() const { return prompt_rows ? parts.prompt_ring : parts.decode_ring; }
  // Pages whose tiles are enqueued; the sink counts always.
  int stored_pages() const { return std::max<int>(1, static_cast<int>(pages.size())); }
  DeviceAddress sink_address() const {
    return pages.empty() ? open_sink->address() : OnDevice(*pages.front()).address();
  }

 private:
  std::shared_ptr<const Lease> lease_;
  SequenceStats stats_;
  uint64_t damages_seen_ = 0;  // of those that the scrubber found
};

}  // namespace crumb::client
