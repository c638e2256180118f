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

// GpuSequence is the DeviceSequence of GpuWorker: see DeviceSequence for the contract. It holds a
// sequence's state, which GpuBatch modifies.
//
// `pages` grows when work that writes a page is enqueued, before the device has run it. Readers on
// other streams wait through PassRef and PrefixLoad, and other sequences find a page only after
// PageSettler has seen its results.
class GpuSequence final : public DeviceSequence {
 public:
  GpuSequence(const GpuWorkerParts& parts, const SequenceOptions& options, SequenceStart start);
  // Creates a fork that uses the origin's first `shared_pages` pages. It has no rows yet, and no
  // sink if the origin's is not full.
  GpuSequence(const GpuSequence& origin, int shared_pages);

  int length() const override { return log.length(); }
  int cached_tokens() const override { return log.hit(); }
  int pass_tokens_max() const override;
  SequenceStats stats() const override;

  // Returns the first position whose row will still be attended or stored.
  int RowsBegin() const;
  // Returns whether page `index` will be published once it settles.
  bool Publishes(int index) const;
  // Appends a page whose tiles are about to be enqueued.
  UnsettledPage AddPage(std::shared_ptr<DevicePage> page);
  // Turns the sink into a page that other sequences can use, once its last row is enqueued.
  UnsettledPage CompleteSink();
  // Returns the first page that was damaged on its way from crumbd, or -1. With `wait` it blocks
  // until all loads are checked; otherwise it ignores loads that are still in flight.
  int DamagedLoad(bool wait);
  // Returns the first page that the scrubber found damaged, or -1.
  int DamagedPage();
  // Releases everything that a finished sequence holds.
  void Release();

  const uint64_t id;  // unique in the process
  const GpuWorkerParts& parts;
  const SequenceOptions options;
  const std::shared_ptr<const KeyspaceBinding> keyspace;
  TokenLog log;
  // pages that are enqueued or loaded; the sink first
  std::vector<std::shared_ptr<const Page>> pages;
  std::shared_ptr<DevicePage> open_sink;  // the sink until it is full; then it is in `pages`
  std::shared_ptr<const SlotRef> rows;    // null: there are none yet
  bool prompt_rows = false;               // `rows` has the shape of prompt_ring
  PassRef last;                           // the latest pass
  // loads that are not yet known to be undamaged
  std::vector<std::shared_ptr<const PrefixLoad>> loads;
  std::shared_ptr<PublishLimit> line;
  std::shared_ptr<WindowSample> sample;  // sample of a window that is evicted soon; usually null
  bool joined = false;  // the stream of its first pass has waited for pages of other sequences
  int fresh = 0;        // tokens of the pass under way
  bool finished = false;

  kernels::PageFormat history_format() const { return keyspace->history_format; }
  const RingShape& ring() const { return prompt_rows ? parts.prompt_ring : parts.decode_ring; }
  // Returns the number of pages whose tiles are enqueued, including the sink even before it is
  // full.
  int stored_pages() const { return std::max<int>(1, static_cast<int>(pages.size())); }
  DeviceAddress sink_address() const {
    return pages.empty() ? open_sink->address() : OnDevice(*pages.front()).address();
  }

 private:
  std::shared_ptr<const Lease> lease_;
  SequenceStats stats_;
  // Number of the scrubber's damages that this sequence has checked for.
  uint64_t damages_seen_ = 0;
};

}  // namespace crumb::client
