// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "client/cpu/cpu_backend.h"
#include "client/cpu/held_queries.h"
#include "client/cpu/recent_rows.h"
#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "client/worker/page_pool.h"
#include "client/worker/page_publisher.h"
#include "client/worker/page_table.h"
#include "client/worker/quality_watch.h"
#include "client/worker/segment_rule.h"
#include "client/worker/sequence_start.h"
#include "client/worker/token_log.h"
#include "client/worker/worker_tally.h"
#include "crumb/acquire.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// The parts of a worker that all of its sequences use. Everything is borrowed from the worker.
struct CpuSequenceParts {
  const WorkerOptions& options;
  SegmentRule rule;
  const CpuBackend& backend;
  PagePool& pool;
  PageTable& table;
  PagePublisher& publisher;
  QualityWatch& watch;
  WorkerTally& tally;
};

// CpuSequence is the Sequence of CpuWorker: see Sequence for the contract.
//
// A page of it is
//     reserved   memory is allocated, when its window is about to be stored (the sink: at once)
//     stored     its tiles are written, layer by layer inside Append or all at the pass's end
//     complete   all layers are stored and all its tokens accepted; it has a key and is shared
//     published  it was queued for crumbd
//
// A rejected draft can undo "stored", never "complete". A page with a non-finite row, and every
// page behind it, is attended here but neither shared nor published.
class CpuSequence final : public Sequence {
 public:
  CpuSequence(const CpuSequenceParts& parts, const SequenceOptions& options, SequenceStart start);

  int length() const override { return log_.length(); }
  int cached_tokens() const override { return log_.hit(); }
  absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                      const kernels::Bf16* v) override;
  absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) override;
  absl::Status Advance(std::span<const int32_t> tokens) override;
  absl::StatusOr<std::unique_ptr<Sequence>> Fork() const override;
  absl::Status Finish() override;
  SequenceStats stats() const override;

 private:
  // The progress of one layer; the layers of a pass proceed one after the other.
  struct LayerState {
    bool appended = false;  // the layer has the pass's rows
    int stored_pages = 0;   // pages whose tiles of this layer are written
  };
  // A window that the quality watch has selected, while its layers are being stored.
  struct WindowMeasurement {
    int head = 0;
    std::vector<QualitySample> layers;
  };

  CpuSequence(const CpuSequence& other, RecentRows rows);

  bool InPrompt() const { return log_.InPrompt(); }
  bool Publishes() const {
    return options_.publish != Publish::kNone && parts_.options.part.publishes;
  }
  absl::Status BeginPass(int tokens);
  absl::Status CheckAppend(int layer, int tokens) const;
  absl::Status CheckAdvance(std::span<const int32_t> tokens) const;
  absl::Status ReservePages(int page_end);
  absl::StatusOr<std::shared_ptr<Page>> NewPage(int index) const;
  void WriteSink(int layer, int tokens, const kernels::Bf16* k, const kernels::Bf16* v);
  void StoreLayers(int layer_begin, int layer_end, int page_end);
  void MeasureStored(int page, int layer_begin, int layer_end);
  void DropFresh(std::span<const int32_t> accepted);
  // Stores the windows of pages before `page_end` that are not stored yet, completes pages whose
  // layers are all stored, and publishes those.
  absl::Status CompletePages(int page_end);
  int HistoryEndNow() const;
  int RowsBegin() const;
  absl::Status ResizeRows(int tokens);

  const CpuSequenceParts parts_;
  const SequenceOptions options_;
  const std::shared_ptr<const KeyspaceBinding> keyspace_;
  std::shared_ptr<const Lease> lease_;
  TokenLog log_;
  // pages_[i] is page i of the sequence. `own_` has the pages that are still being written.
  std::vector<std::shared_ptr<const Page>> pages_;
  std::vector<std::shared_ptr<Page>> own_;
  std::vector<uint64_t> addresses_;  // work space of Attend
  RecentRows rows_;
  std::vector<LayerState> layers_;
  HeldQueries queries_;
  std::map<int, WindowMeasurement> measured_;  // keyed by page
  int fresh_ = 0;                              // tokens of the pass under way
  int complete_pages_;                         // pages with all tiles and a key
  int published_pages_;
  // The first page with a non-finite row; this page and those behind it are not published.
  int damaged_page_ = std::numeric_limits<int>::max();
  bool finished_ = false;
  SequenceStats stats_;
};

}  // namespace crumb::client
