// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpu/cpu_backend.h"
#include "client/gpu/device/background.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/device/timeline.h"
#include "client/gpu/device_geometry.h"
#include "client/gpu/device_page.h"
#include "client/worker/sequence_starter.h"
#include "common/mutex.h"

namespace crumb::client {

// The data of a window that the quality watch has selected, until it is measured. It returns to
// WindowWatch with its last reference. Used by one thread at a time.
struct WindowSample {
  int page = 0;    // index of the window in its sequence
  int head = 0;    // the KV head to measure, counted from this rank's first
  int tokens = 0;  // number of queries held
  PassRef last;    // the last pass that writes to it

  DeviceBuffer queries;  // [layers, kTokens, query heads of a KV head, head_dim] bf16
  DeviceBuffer rows;     // [layers, K and V, 64, head_dim] bf16
  PinnedBuffer host;     // queries and rows, then the tiles [layers]
};

// WindowWatch measures windows of a GPU worker that its QualityWatch selects. When such a window is
// evicted, its exact rows and the queries of a pass are copied aside on the device. A thread copies
// them and the page's tiles to the host, on a stream of its own behind that pass, and measures them
// there. It has a few samples; while all are in use, no window is selected. Thread-safe.
//
// At most two windows are in flight. A sample's buffers hold the rows of one KV head of all layers;
// measuring takes a few milliseconds of the thread's time on the CPU.
class WindowWatch {
 public:
  static constexpr int kTokens = 4;  // maximum number of queries per sample

  // Allocates all memory. Everything is borrowed.
  static absl::StatusOr<std::unique_ptr<WindowWatch>> Create(Device& device,
                                                             const WorkerOptions& options,
                                                             const DeviceGeometry& geometry,
                                                             SequenceStarter& starter);

  // Called once for each evicted window. Returns memory for its sample, which work on `stream` may
  // fill, or null if the window is not selected.
  std::shared_ptr<WindowSample> NextSample(int page, DeviceStream stream);

  // Keeps the queries of the last of `tokens` tokens of one layer, after work enqueued on the
  // stream of `moment`, whose pass is under way. q device [tokens, q_heads, head_dim]
  absl::Status HoldQueries(WindowSample& sample, const PassRef& moment, int layer, DeviceAddress q,
                           int tokens) const;
  // Does the same for all layers at once, with queries of the sample's head only.
  // held device [layers, tokens, query heads of a KV head, head_dim]
  absl::Status HoldQueriesOfAll(WindowSample& sample, const PassRef& moment, DeviceAddress held,
                                int tokens) const;
  // Keeps the window's rows before later rows overwrite them.
  absl::Status HoldRows(WindowSample& sample, const PassRef& moment, DeviceAddress ring,
                        const RingShape& shape) const;

  // Measures the window in the background. REQUIRES: the pass that wrote the sample's rows also
  // writes `page`, and has ended.
  void Measure(std::shared_ptr<WindowSample> sample, std::shared_ptr<const DevicePage> page);

  // Returns the size of a token's queries that read one KV head.
  size_t token_bytes() const {
    return size_t{2} * geometry_.q_heads / geometry_.kv_heads * geometry_.head_dim;
  }

  // Blocks until all samples passed to Measure are measured. kDeadlineExceeded: not within
  // `timeout`.
  absl::Status WaitIdle(Duration timeout) { return background_.WaitIdle(timeout); }

 private:
  // The samples that are not in use.
  class Idle {
   public:
    void Add(std::unique_ptr<WindowSample> sample) {
      MutexLock lock(&mutex_);
      samples_.push_back(std::move(sample));
    }
    std::unique_ptr<WindowSample> Take() {
      MutexLock lock(&mutex_);
      if (samples_.empty()) return nullptr;
      std::unique_ptr<WindowSample> sample = std::move(samples_.back());
      samples_.pop_back();
      return sample;
    }

   private:
    Mutex mutex_;
    std::vector<std::unique_ptr<WindowSample>> samples_ ABSL_GUARDED_BY(mutex_);
  };

  WindowWatch(Device& device, const WorkerOptions& options, const DeviceGeometry& geometry,
              SequenceStarter& starter)
      : device_(device),
        geometry_(geometry),
        starter_(starter),
        backend_(options),
        background_("crumb-watch") {}
  // Bytes of the keys or values of a window in one layer, and of a sample's queries and rows.
  size_t window_bytes() const { return size_t{2} * kPageTokens * geometry_.head_dim; }
  size_t queries_bytes() const { return geometry_.layers * kTokens * token_bytes(); }
  size_t rows_bytes() const { return 2 * geometry_.layers * window_bytes(); }
  // Copies a sample and the page's tiles of its KV head to the host, and waits for that.
  absl::Status CopyToHost(WindowSample& sample, const DevicePage& page);
  // Returns the errors of all layers; none if a row is not finite.
  std::vector<QualitySample> MeasureAll(const WindowSample& sample, const DevicePage& page) const;

  Device& device_;
  const DeviceGeometry& geometry_;
  SequenceStarter& starter_;
  const CpuBackend backend_;
  const std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
  OwnedStream stream_;
  OwnedEvent copied_;
  Background background_;  // its thread uses everything above
};

}  // namespace crumb::client
