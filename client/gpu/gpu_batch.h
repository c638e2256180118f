// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/decode_plans.h"
#include "client/gpu/device/timeline.h"
#include "client/gpu/gpu_sequence.h"
#include "client/gpu/gpu_worker_parts.h"
#include "client/gpu/pass_tables.h"
#include "client/gpu/window_evictor.h"
#include "crumb/device_worker.h"

namespace crumb::client {

// GpuBatch is the DeviceBatch of GpuWorker: see DeviceBatch for the contract.
//
// A pass, as the stream sees it:
//     Prepare   eviction of windows that are not part of a captured launch; tables to the device
//     Start     eviction of due decode windows; plans
//     per layer Append: rows to sinks and rings; Attend: waits for the layer's load, then a kernel
//     Advance   results of evictions to the host; the pass ends on the timeline
//
// Prepare takes all slots that the pass needs before it changes anything, so that
// kResourceExhausted leaves sequences as they were. gpu_batch_attention.cc has the launches of a
// layer.
class GpuBatch final : public DeviceBatch {
 public:
  // `parts` is borrowed.
  static absl::StatusOr<std::unique_ptr<GpuBatch>> Create(const GpuWorkerParts& parts,
                                                          const DeviceBatchOptions& options);
  ~GpuBatch() override;

  absl::Status Prepare(std::span<const PassEntry> entries) override;
  absl::Status Start() override;
  absl::Status Append(int layer, const void* k, const void* v) override;
  absl::Status Attend(int layer, const void* q, void* out) override;
  absl::Status Advance(std::span<const std::span<const int32_t>> tokens) override;
  absl::StatusOr<std::unique_ptr<DeviceSequence>> Fork(DeviceSequence& sequence) override;
  absl::Status Finish(DeviceSequence& sequence) override;

 private:
  using Slots = std::vector<std::shared_ptr<const SlotRef>>;
  // The slots that a pass needs. Prepare takes them before it changes anything.
  struct PassSlots {
    Slots sinks;       // used by entries without a sink
    Slots rings;       // used by entries without rows of the pass's kind
    Slots pages;       // used by due windows that become INT2 pages
    Slots bf16_pages;  // used by due windows that become BF16 pages
  };

  GpuBatch(const GpuWorkerParts& parts, const DeviceBatchOptions& options)
      : parts_(parts), options_(options) {}
  // Allocates tables, plans and work memory for the batch's sizes. kInvalidArgument: the sizes are
  // out of range, or the kernels do not support them.
  absl::Status Allocate();
  // Return the sizes of the batch as the kernels take them.
  kernels::cuda::DecodeShape DecodeShape() const;
  kernels::cuda::PrefillShape PrefillShape() const;
  bool prompt() const { return options_.kind == PassKind::kPrompt; }

  // Returns the sequence as this worker's type. kInvalidArgument: it belongs to another worker.
  absl::StatusOr<GpuSequence*> OwnSequence(DeviceSequence* sequence) const;
  // Returns the sequences of the entries if a pass over them can be prepared.
  absl::StatusOr<std::vector<GpuSequence*>> CheckEntries(std::span<const PassEntry> entries) const;
  // kFailedPrecondition: a pass is under way, or the sequence was finished or is in another batch's
  // pass.
  absl::Status CheckOutside(const GpuSequence& sequence) const;
  // Returns the page index behind the last window that is evicted before the pass.
  int DueEnd(const GpuSequence& sequence) const;
  int DueWindows(const GpuSequence& sequence) const {
    return std::max(0, DueEnd(sequence) - sequence.stored_pages());
  }
  // Returns whether the sequence needs a ring of the pass's kind before the pass.
  bool NeedsRows(const GpuSequence& sequence) const {
    return sequence.rows == nullptr || sequence.prompt_rows != prompt();
  }
  // Takes all slots that a pass over the sequences needs. kResourceExhausted: none is taken.
  absl::StatusOr<PassSlots> TakeSlots(std::span<GpuSequence* const> sequences);
  // Makes the stream wait for passes of other streams, and before decode for loads, that write
  // pages of the sequence.
  absl::Status Join(GpuSequence& sequence);
  // Gives the sequence a ring of the pass's kind and copies the rows that it still needs.
  absl::Status GiveRows(GpuSequence& sequence, std::shared_ptr<const SlotRef> rows);
  // Enqueues the copy of the rows of positions [begin, end) to a ring of the pass's kind at `to`.
  absl::Status CopyRange(const GpuSequence& from, DeviceAddress to, int begin, int end);
  // Fills the tables of the pass and enqueues their copy.
  absl::Status FillTables(uint64_t pass);
  // Selects windows for measurement: in a prompt those evicted after a pass that ends a block or
  // the prompt; in a decode pass one of those evicted in it. The pass keeps its queries for them.
  void TakeSamples(std::span<GpuSequence* const> sequences, std::span<const DueWindow> in_pass);
  void TakeSample(GpuSequence& sequence, int page_begin, int page_end);
  // Keeps queries of one layer for the samples of a prompt pass. q device [fresh tokens, q_heads,
  // head_dim] bf16
  absl::Status HoldQueries(int layer, const void* q) const;
  // Returns the table row of a sequence for this pass.
  PassTables::SequenceRow RowOf(const GpuSequence& sequence) const;
  // Append and Attend of prompt passes: fresh rows are attended where the engine has them.
  absl::Status AppendPrompt(int layer, const void* k, const void* v);
  absl::Status AttendPrompt(int layer, const void* q, void* out);
  // Sets the inputs that decode and prefill attention have in common.
  void SetInputs(int layer, const float* offsets, kernels::cuda::AttentionInputs* params) const;
  // Enqueues the computation of q . mu_k for one layer; returns null if the model has no means.
  absl::StatusOr<const float*> Offsets(int layer, const void* q);
  // Checks the accepted tokens of all entries before anything changes.
  absl::Status CheckTokens(std::span<const std::span<const int32_t>> tokens) const;
  static absl::Status DamagedError(const std::string& where);
  // Adds the accepted tokens to their sequences and collects sinks that are full. Finishes
  // sequences that attended damaged pages and returns a text that names them; empty: there are
  // none.
  std::string Accept(std::span<const std::span<const int32_t>> tokens, uint64_t pass,
                     std::vector<UnsettledPage>* sinks);

  const GpuWorkerParts& parts_;
  const DeviceBatchOptions options_;
  std::shared_ptr<Timeline> timeline_;
  std::unique_ptr<PassTables> tables_;
  std::unique_ptr<WindowEvictor> evictor_;
  DecodePlans plans_;
  DeviceBuffer workspace_;
  DeviceBuffer offsets_;                  // q . mu_k of one layer
  DeviceBuffer held_;                     // queries of a decode pass for `sample_`, or empty
  std::shared_ptr<WindowSample> sample_;  // sample of the pass under way
  const GpuSequence* sampled_ = nullptr;
  std::vector<GpuSequence*> entries_;  // sequences of the pass under way
  int fresh_ = 0;                      // number of their fresh tokens
  const void* prompt_k_ = nullptr;     // rows that Attend of the layer reads
  const void* prompt_v_ = nullptr;
  uint64_t pass_ = 0;
};

}  // namespace crumb::client
