// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "crumb/counters.h"
#include "crumb/device_options.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"

namespace crumb::client {

class Client;
class Device;

// Destroys what OpenCudaDevice made.
struct CloseDevice {
  void operator()(Device* device) const;
};
using OpenDevice = std::unique_ptr<Device, CloseDevice>;

// CUDA device `ordinal` for DeviceWorker::Open, by the CUDA runtime of this process: an engine's
// streams and pointers can be used with it. Threads keep the current device they had.
// kUnavailable: no driver or no such device; kFailedPrecondition: the program was built without
// CUDA (CRUMB_CUDA=OFF).
absl::StatusOr<OpenDevice> OpenCudaDevice(int ordinal);

// Keys and values of one request in device memory, in three segments as Sequence has them. Made by
// DeviceWorker::Begin and by DeviceBatch::Fork; must not outlive its worker, and a batch that a
// prepared pass brings it through. Batches do everything with it; it goes from one to another as
// the engine likes. Dropping it unfinished publishes nothing more. Not thread-safe.
class DeviceSequence {
 public:
  virtual ~DeviceSequence() = default;
  DeviceSequence(const DeviceSequence&) = delete;
  DeviceSequence& operator=(const DeviceSequence&) = delete;

  // Tokens held: the position of the next one. Starts at cached_tokens().
  virtual int length() const = 0;
  // Leading prompt tokens that came from the cache, a multiple of 64: the engine computes the rest.
  virtual int cached_tokens() const = 0;
  // Most tokens that the next pass may bring: in the prompt up to its end or that of the prefill
  // block, then 1 + draft_slots.
  virtual int pass_tokens_max() const = 0;

  virtual SequenceStats stats() const = 0;

 protected:
  DeviceSequence() = default;
};

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

// A device sequence and what the other ranks of its engine begin theirs with.
struct LedDeviceSequence {
  std::unique_ptr<DeviceSequence> sequence;
  std::string token;
};

// The KV cache of one model replica, or of one rank of it, in the memory of one GPU: what Worker is
// on the CPU, with the same options, keyspaces, prefixes and published pages. Thread-safe.
// Threads of its own look at the results of evicted windows, publish pages and measure windows.
class DeviceWorker {
 public:
  virtual ~DeviceWorker() = default;
  DeviceWorker(const DeviceWorker&) = delete;
  DeviceWorker& operator=(const DeviceWorker&) = delete;

  // `client` is borrowed and may be null: no crumbd. `device` is borrowed and outlives the worker.
  // Allocates everything. kInvalidArgument: an option, or one that the device back end does not
  // serve (more than 7 draft slots); kResourceExhausted: too little device memory.
  static absl::StatusOr<std::unique_ptr<DeviceWorker>> Open(
      const WorkerOptions& options, const DeviceWorkerOptions& device_options, Client* client,
      Device& device);

  // As Worker::Begin, Lead and Follow. Cached pages are on their way to the device when this
  // returns, layer after layer; a pass may begin at once. kResourceExhausted: no device memory for
  // BF16 history, which the keyspace's state asks for.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> Begin(
      std::span<const int32_t> tokens, const SequenceOptions& options = {}) = 0;
  virtual absl::StatusOr<LedDeviceSequence> Lead(std::span<const int32_t> tokens,
                                                 const SequenceOptions& options = {}) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> Follow(
      std::string_view token, std::span<const int32_t> tokens,
      const SequenceOptions& options = {}) = 0;

  // kInvalidArgument: sizes that the kernels do not serve; kResourceExhausted: device memory.
  virtual absl::StatusOr<std::unique_ptr<DeviceBatch>> NewBatch(
      const DeviceBatchOptions& options) = 0;

  // Waits until everything that passes have evicted so far was published or dropped, and measured
  // where the quality watch wants that.
  // kDeadlineExceeded: not within `timeout`.
  virtual absl::Status WaitPublished(Duration timeout) = 0;

  virtual const WorkerOptions& options() const = 0;
  virtual WorkerCounters counters() const = 0;
  virtual DevicePoolUse pool_use() const = 0;  // zeros without pools

 protected:
  DeviceWorker() = default;
};

}  // namespace crumb::client
