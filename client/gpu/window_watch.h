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

// A window that the quality watch has picked: what is kept of it until it is measured. Used by one
// thread at a time. Given back with its last reference.
struct WindowSample {
  int page = 0;    // the window's, in its sequence
  int head = 0;    // the KV head to measure, of this rank's
  int tokens = 0;  // queries held
  PassRef last;    // the pass that wrote to it last

  DeviceBuffer queries;  // [layers, kTokens, query heads of a KV head, head_dim] bf16
  DeviceBuffer rows;     // [layers, K and V, 64, head_dim] bf16
  PinnedBuffer host;     // both, then the tiles: [layers]
};

// Measures windows of a device worker as its QualityWatch asks for. While a window leaves, its
// exact rows and the queries of a pass are copied aside on the device; a thread of its own, behind
// that pass, brings them and the page's tiles to the host on a stream of its own, and measures them
// there. A few windows at once; while these are on their way, no other's turn comes. Thread-safe.
class WindowWatch {
 public:
  static constexpr int kTokens = 4;  // queries of a sample at most

  // Everything is borrowed. All memory is allocated here.
  static absl::StatusOr<std::unique_ptr<WindowWatch>> Create(Device& device,
                                                             const WorkerOptions& options,
                                                             const DeviceGeometry& geometry,
                                                             SequenceStarter& starter);

  // Asked once for each window that leaves: what to keep it in by work on `stream`, or null, when
  // it is not to be measured.
  std::shared_ptr<WindowSample> NextSample(int page, DeviceStream stream);

  // Keeps the queries of the last of `tokens` tokens of one layer, behind what is enqueued on the
  // stream of `moment`, whose pass is under way. q device [tokens, q_heads, head_dim]
  absl::Status HoldQueries(WindowSample& sample, const PassRef& moment, int layer, DeviceAddress q,
                           int tokens) const;
  // The same of all layers at once, of the sample's head alone.
  // held device [layers, tokens, query heads of a KV head, head_dim]
  absl::Status HoldQueriesOfAll(WindowSample& sample, const PassRef& moment, DeviceAddress held,
                                int tokens) const;
  // Keeps the window's rows, before later ones take their place.
  absl::Status HoldRows(WindowSample& sample, const PassRef& moment, DeviceAddress ring,
                        const RingShape& shape) const;

  // Measures the window in the background; its page is written by the same pass as the sample's
  // rows, which has ended on the host.
  void Measure(std::shared_ptr<WindowSample> sample, std::shared_ptr<const DevicePage> page);

  // Bytes of a token's queries that read one KV head.
  size_t token_bytes() const {
    return size_t{2} * geometry_.q_heads / geometry_.kv_heads * geometry_.head_dim;
  }

  // Waits until the samples that were given to Measure are measured. kDeadlineExceeded.
  absl::Status WaitIdle(Duration timeout) { return background_.WaitIdle(timeout); }

 private:
  // The samples without a window.
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
  size_t window_bytes() const { return size_t{2} * kPageTokens * geometry_.head_dim; }
  size_t queries_bytes() const { return geometry_.layers * kTokens * token_bytes(); }
  size_t rows_bytes() const { return 2 * geometry_.layers * window_bytes(); }
  absl::Status Bring(WindowSample& sample, const DevicePage& page);
  std::vector<QualitySample> MeasureAll(const WindowSample& sample, const DevicePage& page) const;

  Device& device_;
  const DeviceGeometry& geometry_;
  SequenceStarter& starter_;
  const CpuBackend backend_;
  const std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
  OwnedStream stream_;
  OwnedEvent brought_;
  Background background_;  // its thread uses all of it
};

}  // namespace crumb::client
