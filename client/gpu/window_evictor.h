// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/timeline.h"
#include "client/gpu/gpu_sequence.h"
#include "client/gpu/gpu_worker_parts.h"

namespace crumb::client {

// A window that is due for eviction, and the slot of its page.
struct DueWindow {
  GpuSequence* sequence = nullptr;
  std::shared_ptr<const SlotRef> slot;
};

// WindowEvictor turns windows of sequences into pages, for all layers and sequences in one launch:
// the windows of a decode pass in a launch that may be captured, others at once. Not thread-safe.
//
// For a decode pass: Prepare(windows) -> Launch (captured) -> Collect -> Settle, all in the pass.
// For others:        EvictNow(windows), which does the same at once in a pass of its own.
//
// The captured launch always has room for every sequence of the batch and reads the number of
// windows from its table; without windows it returns at once.
class WindowEvictor {
 public:
  // `parts` is borrowed. A decode pass evicts at most `windows` windows.
  static absl::StatusOr<std::unique_ptr<WindowEvictor>> Create(
      const GpuWorkerParts& parts, const std::shared_ptr<Timeline>& timeline, int windows);

  // Evicts windows in passes of their own. REQUIRES: each window is the next one of its sequence,
  // and windows of one sequence are in order.
  absl::Status EvictNow(std::span<const DueWindow> windows);

  // Copies the table of the windows that leave decode rings for INT2 pages in this pass to the
  // device.
  absl::Status Prepare(uint64_t pass, std::span<const DueWindow> windows);
  // Launches the eviction of the pass, with the same parameters in every pass.
  absl::Status Launch();
  // Enqueues the copy of the results to the host. Settle is called after the end of the pass.
  absl::Status Collect();
  void Settle(uint64_t pass);

 private:
  // The tables of a launch in device memory, laid out as in EvictTable, and its workspace.
  struct Area {
    int windows_max = 0;
    DeviceBuffer memory;
    DeviceBuffer workspace;
    EvictTable table;
  };

  WindowEvictor(const GpuWorkerParts& parts, std::shared_ptr<Timeline> timeline)
      : parts_(parts), timeline_(std::move(timeline)) {}
  // Allocates tables and workspace for launches of up to `windows_max` windows.
  absl::Status MakeArea(int windows_max, Area* area);
  // Adds the windows' pages to their sequences and fills in the table `to`.
  std::vector<UnsettledPage> Fill(uint64_t pass, std::span<const DueWindow> windows,
                                  const EvictTable& to);
  // A window selected for measurement, and its page.
  struct SampledPage {
    std::shared_ptr<WindowSample> sample;
    std::shared_ptr<const DevicePage> page;
  };
  // Keeps the rows of the windows that were selected for measurement; pages[i] belongs to
  // windows[i].
  absl::Status HoldSamples(uint64_t pass, std::span<const DueWindow> windows,
                           std::span<const UnsettledPage> pages, std::vector<SampledPage>* sampled);
  // Passes samples whose pass has ended to the quality watch.
  void Measure(std::vector<SampledPage> sampled);
  // Enqueue the copy of a launch's tables to the device, the launch, and the copy of its results.
  absl::Status Upload(const EvictTable& from, const Area& area);
  absl::Status Launch(const Area& area, const RingShape& ring, kernels::PageFormat format);
  absl::Status Download(const Area& area, size_t windows, const EvictTable& to);
  // Evicts windows with one kind of rows and one page format.
  absl::Status EvictSome(std::span<const DueWindow> windows);

  const GpuWorkerParts& parts_;
  const std::shared_ptr<Timeline> timeline_;
  Area captured_;
  Area now_;
  PinnedBuffer none_;            // the table of a pass without windows
  bool none_there_ = false;      // the device has that table already
  EvictResults::Table results_;  // results of the pass under way; null without windows
  std::vector<UnsettledPage> pages_;
  std::vector<SampledPage> sampled_;
};

}  // namespace crumb::client
