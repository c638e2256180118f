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

// Destroys the result of OpenCudaDevice.
struct CloseDevice {
  void operator()(Device* device) const;
};
using OpenDevice = std::unique_ptr<Device, CloseDevice>;

// Opens CUDA device `ordinal` for DeviceWorker::Open through this process's CUDA runtime, so that
// an engine's streams and pointers can be used with it. Does not change the current device of any
// thread. kUnavailable: there is no driver or no such device; kFailedPrecondition: the program was
// built without CUDA (CRUMB_CUDA=OFF).
absl::StatusOr<OpenDevice> OpenCudaDevice(int ordinal);

// Keys and values of one request in device memory, in the three segments that Sequence describes.
// DeviceWorker::Begin and DeviceBatch::Fork create it. It must not outlive its worker, nor a batch
// whose prepared pass contains it. Any batch of the worker can process it, one after the other.
// Destroying it unfinished publishes nothing more. Not thread-safe.
class DeviceSequence {
 public:
  virtual ~DeviceSequence() = default;
  DeviceSequence(const DeviceSequence&) = delete;
  DeviceSequence& operator=(const DeviceSequence&) = delete;

  // Number of tokens held, which is the position of the next one. It starts at cached_tokens().
  virtual int length() const = 0;
  // Number of leading prompt tokens that came from the cache, a multiple of 64. The engine computes
  // the rest.
  virtual int cached_tokens() const = 0;
  // Maximum number of tokens in the next pass. In the prompt it ends at the end of the prompt or of
  // the prefill block; afterwards it is 1 + draft_slots.
  virtual int pass_tokens_max() const = 0;

  virtual SequenceStats stats() const = 0;

 protected:
  DeviceSequence() = default;
};

// One sequence and its number of tokens in a pass.
struct PassEntry {
  DeviceSequence* sequence = nullptr;
  int tokens = 1;  // fresh tokens; for kDecode the batch's number
};

// DeviceBatch runs passes of many sequences on one stream: page tables, lengths and launches. A
// pass is
//
//     Prepare(entries)                     host work; copies tables to the device
//     Start()                              evicts all due windows in one launch
//     Append(layer, k, v), Attend(layer, q, out)     for every layer
//     Advance(tokens)                      once the engine knows which tokens it keeps
//
// Everything is enqueued on the batch's stream. No call between Prepare and Advance allocates or
// waits. For a kDecode batch, Start, Append and Attend can be captured into a CUDA graph once,
// between the Prepare and Advance of any pass; the graph then replaces them in every later pass,
// whatever its sequences. Prepare waits while passes_in_flight passes are queued, and for nothing
// else.
//
// Not thread-safe. A batch must not outlive its worker, and its sequences must not be destroyed
// inside a pass. kInternal: the device failed; destroy the worker.
class DeviceBatch {
 public:
  virtual ~DeviceBatch() = default;
  DeviceBatch(const DeviceBatch&) = delete;
  DeviceBatch& operator=(const DeviceBatch&) = delete;

  // Sequence i of the pass occupies row i. Rows behind the last entry are padding: the kernels read
  // their q, k and v without using them and do not write their `out`. kInvalidArgument: too many
  // entries, a sequence twice, of the wrong kind or of another worker, or tokens out of range.
  // kResourceExhausted: no room for pages or rows in device memory; nothing has changed, so end
  // other sequences first. kFailedPrecondition: a pass is under way, or a sequence was finished.
  virtual absl::Status Prepare(std::span<const PassEntry> entries) = 0;

  // Launches the eviction of windows that are due in a decode pass; Prepare evicts all others.
  virtual absl::Status Start() = 0;

  // Stores the fresh tokens' keys and values of one layer, after QK-norm and RoPE. For kPrompt,
  // Attend of the layer reads `k` and `v` as well.
  // kDecode: k, v device [sequences, tokens, kv_heads, head_dim] bf16
  // kPrompt: k, v device [all fresh tokens of the pass, kv_heads, head_dim] bf16, entry by entry
  virtual absl::Status Append(int layer, const void* k, const void* v) = 0;

  // Computes causal attention of the fresh tokens over everything held, themselves included. The
  // stream waits for this layer of prefixes that are still being copied.
  // kDecode: q device [sequences, tokens, q_heads, head_dim] bf16
  // kPrompt: q device [all fresh tokens of the pass, q_heads, head_dim] bf16
  // out device, shaped as q, in the type DeviceBatchOptions::output and the model's basis
  virtual absl::Status Attend(int layer, const void* q, void* out) = 0;

  // Ends the pass: the first tokens[i].size() fresh tokens of entry i become part of its sequence,
  // the others (rejected drafts, or an abandoned pass) are dropped. Does not wait for the device,
  // except at the end of a prompt for the check of fetched pages, which the pass's outputs have
  // waited for. kInvalidArgument: more tokens than were fresh, or ids that differ from the prompt;
  // nothing has changed. kDataLoss: fetched pages, or pages in device memory, are damaged; the
  // outputs of the sequences that the message names are void, so drop these sequences. The pass has
  // ended for all.
  virtual absl::Status Advance(std::span<const std::span<const int32_t>> tokens) = 0;

  // Returns another sequence that continues from here; pages are common to both, windows are
  // copied. Between passes only (kFailedPrecondition). kResourceExhausted as for Prepare.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> Fork(DeviceSequence& sequence) = 0;

  // Publishes every full page, including those in the recent window. The sequence takes part in no
  // more passes and may be destroyed at once. Between passes only. kResourceExhausted: there is no
  // room for these pages, which stay unpublished. kDataLoss: the sequence attends a damaged page,
  // and nothing is published.
  virtual absl::Status Finish(DeviceSequence& sequence) = 0;

 protected:
  DeviceBatch() = default;
};

// A device sequence, and the token with which the other ranks of its engine begin theirs.
struct LedDeviceSequence {
  std::unique_ptr<DeviceSequence> sequence;
  std::string token;
};

// DeviceWorker is the KV cache of one model replica, or of one rank of it, in the memory of one
// GPU. It is the counterpart of Worker, with the same options, keyspaces, prefixes and published
// pages. Its own threads read the results of evictions, publish pages and measure windows.
// Thread-safe.
//
// Its sequences and batches must be destroyed before it, and `device` and `client` after it.
// docs/device_worker.md has the memory, the threads and the way of a prefix to the device.
class DeviceWorker {
 public:
  virtual ~DeviceWorker() = default;
  DeviceWorker(const DeviceWorker&) = delete;
  DeviceWorker& operator=(const DeviceWorker&) = delete;

  // Allocates all memory. `client` is borrowed and may be null, which means no crumbd. `device` is
  // borrowed and must outlive the worker. kInvalidArgument: an option is wrong or not supported on
  // devices (more than 7 draft slots); kResourceExhausted: there is too little device memory.
  static absl::StatusOr<std::unique_ptr<DeviceWorker>> Open(
      const WorkerOptions& options, const DeviceWorkerOptions& device_options, Client* client,
      Device& device);

  // These calls have the contracts of Worker::Begin, Lead and Follow. When a call returns, cached
  // pages are being copied to the device layer by layer, and a pass may begin at once.
  // kResourceExhausted: there is no device memory for BF16 history, which the keyspace's state
  // demands.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> Begin(
      std::span<const int32_t> tokens, const SequenceOptions& options = {}) = 0;
  virtual absl::StatusOr<LedDeviceSequence> Lead(std::span<const int32_t> tokens,
                                                 const SequenceOptions& options = {}) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> Follow(
      std::string_view token, std::span<const int32_t> tokens,
      const SequenceOptions& options = {}) = 0;

  // kInvalidArgument: the kernels do not support these sizes; kResourceExhausted: too little device
  // memory.
  virtual absl::StatusOr<std::unique_ptr<DeviceBatch>> NewBatch(
      const DeviceBatchOptions& options) = 0;

  // Blocks until every page that passes have evicted so far was published or dropped, and measured
  // if the quality watch selected it. kDeadlineExceeded: not within `timeout`.
  virtual absl::Status WaitPublished(Duration timeout) = 0;

  virtual const WorkerOptions& options() const = 0;
  virtual WorkerCounters counters() const = 0;
  virtual DevicePoolUse pool_use() const = 0;  // all zeros without pools

 protected:
  DeviceWorker() = default;
};

}  // namespace crumb::client
