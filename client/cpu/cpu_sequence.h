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

  // Makes a fork that shares the complete pages of `other` and owns a copy of its rows.
  CpuSequence(const CpuSequence& other, RecentRows rows);

  bool InPrompt() const { return log_.InPrompt(); }
  // Returns whether complete pages are offered to crumbd at all.
  bool Publishes() const {
    return options_.publish != Publish::kNone && parts_.options.part.publishes;
  }
  // Prepares memory for a pass of `tokens` fresh tokens, with its first Append. kResourceExhausted:
  // there is none, and the pass has not begun.
  absl::Status BeginPass(int tokens);
  // kInvalidArgument: layer or number of tokens; kFailedPrecondition: the sequence was finished, or
  // the layer has its rows already.
  absl::Status CheckAppend(int layer, int tokens) const;
  // Checks accepted tokens before anything changes. An empty span abandons the pass.
  absl::Status CheckAdvance(std::span<const int32_t> tokens) const;
  // Allocates pages up to `page_end`. kResourceExhausted: the pool's bound is reached; the pages
  // before stay.
  absl::Status ReservePages(int page_end);
  // Allocates page `index`: BF16 for the sink, else the keyspace's format.
  absl::StatusOr<std::shared_ptr<Page>> NewPage(int index) const;
  // Writes fresh rows that belong to the sink. k, v [tokens, kv_heads, head_dim]
  void WriteSink(int layer, int tokens, const kernels::Bf16* k, const kernels::Bf16* v);
  // Stores the windows before `page_end` that these layers have not stored yet.
  void StoreLayers(int layer_begin, int layer_end, int page_end);
  // Measures a stored window against its exact rows if the quality watch has selected it.
  void MeasureStored(int page, int layer_begin, int layer_end);
  // Ends the pass with the accepted tokens. Pages that were stored with rejected ones count as not
  // stored.
  void DropFresh(std::span<const int32_t> accepted);
  // Stores the windows of pages before `page_end` that are not stored yet, completes pages whose
  // layers are all stored, and publishes those.
  absl::Status CompletePages(int page_end);
  // Returns the first position behind the history pages, as the next token attends them.
  int HistoryEndNow() const;
  // Returns the first position whose BF16 row will still be attended or stored.
  int RowsBegin() const;
  // Makes room for the pass in the ring: in the prompt up to the end of the prefill block,
  // afterwards for the recent window and the drafts.
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
