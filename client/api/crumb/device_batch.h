// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "crumb/device_options.h"
#include "crumb/device_sequence.h"

namespace crumb::client {

// One sequence's share of a pass.
struct PassEntry {
  DeviceSequence* sequence = nullptr;
  int tokens = 1;  // fresh ones; kDecode: the batch's
};

// Runs passes of many sequences on one stream: page tables, lengths, the launches. A pass is
//
//   Prepare(entries)                                  host work, tables to the device
//   Start()                                           windows that are due leave, all in one launch
//   for every layer: Append(layer, k, v), Attend(layer, q, out)
//   Advance(tokens)                                   after the engine knows which it keeps
//
// Everything is enqueued on the batch's stream. No call between Prepare and Advance allocates or
// waits, and of a kDecode batch those three can be captured into a CUDA graph once, between the
// Prepare and Advance of any pass; the graph then stands for them in every later pass, whatever its
// sequences. Prepare waits while passes_in_flight passes are queued, and for nothing else.
//
// Not thread-safe. Must not outlive its worker; its sequences must not be dropped inside a pass.
// kInternal: the device failed, the worker is to be given up.
class DeviceBatch {
 public:
  virtual ~DeviceBatch() = default;
  DeviceBatch(const DeviceBatch&) = delete;
  DeviceBatch& operator=(const DeviceBatch&) = delete;

  // Sequence i of the pass has place i; places behind the last entry are padding: their rows of q,
  // k and v are read and not used, their rows of `out` not written. kInvalidArgument: more entries
  // than places, a sequence twice or of the wrong kind, tokens out of range. kResourceExhausted: no
  // room for pages or rows in device memory; nothing has changed, end or finish other sequences
  // first. kFailedPrecondition: a pass is under way, or a sequence was finished.
  virtual absl::Status Prepare(std::span<const PassEntry> entries) = 0;

  virtual absl::Status Start() = 0;

  // The fresh tokens' rows of one layer, after QK-norm and RoPE, in device memory.
  // kDecode: k, v device [sequences, tokens, kv_heads, head_dim] bf16
  // kPrompt: k, v device [all fresh tokens of the pass, kv_heads, head_dim] bf16, entry by entry;
  //          Attend of the layer reads them too
  virtual absl::Status Append(int layer, const void* k, const void* v) = 0;

  // Causal attention of the fresh tokens over everything held, themselves included.
  // kDecode: q device [sequences, tokens, q_heads, head_dim] bf16
  // kPrompt: q device [all fresh tokens of the pass, q_heads, head_dim] bf16
  // out, as q: of DeviceBatchOptions::output, the model's basis
  // Waits, on the stream, for the layer of prefixes that are still on their way.
  virtual absl::Status Attend(int layer, const void* q, void* out) = 0;

  // Ends the pass: of entry i the first tokens[i].size() fresh tokens are part of the sequence from
  // now on, the others (rejected drafts, or a pass given up) are dropped. Does not wait for the
  // device, but behind a prompt for the check of fetched pages, which the pass's outputs waited
  // for. kInvalidArgument: more than were fresh, or ids that differ from the prompt; nothing has
  // changed. kDataLoss: fetched pages were damaged, or pages were found so where they lie: the
  // outputs of the sequences that the message names are void, drop these; the pass is ended for
  // all.
  virtual absl::Status Advance(std::span<const std::span<const int32_t>> tokens) = 0;

  // Another sequence that continues from here: pages are shared, windows are copied. Between passes
  // (kFailedPrecondition). kResourceExhausted as Prepare.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> Fork(DeviceSequence& sequence) = 0;

  // Publishes every full page, those in the recent window too; the sequence takes no more passes
  // and may be dropped at once. Between passes. kResourceExhausted: no room for these pages, they
  // stay unpublished. kDataLoss: it attends a page that was found damaged, nothing is published.
  virtual absl::Status Finish(DeviceSequence& sequence) = 0;

 protected:
  DeviceBatch() = default;
};

}  // namespace crumb::client
