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

// A window that is due to leave its sequence's rows, and the slot it goes to.
struct DueWindow {
  GpuSequence* sequence = nullptr;
  std::shared_ptr<const SlotRef> slot;
};

// Turns windows of sequences into pages, all layers and sequences in one launch: those of a decode
// pass by a launch that may be captured, others at once. Not thread-safe.
class WindowEvictor {
 public:
  // `windows` of a decode pass at most. `parts` is borrowed.
  static absl::StatusOr<std::unique_ptr<WindowEvictor>> Create(
      const GpuWorkerParts& parts, const std::shared_ptr<Timeline>& timeline, int windows);

  // Each window is the next one of its sequence; of one sequence in order.
  // Evicts windows as passes of their own.
  absl::Status EvictNow(std::span<const DueWindow> windows);

  // Tells the device which windows of decode rings leave for INT2 pages in the pass that was begun.
  absl::Status Prepare(uint64_t pass, std::span<const DueWindow> windows);
  // The launch of that pass: the same for every one.
  absl::Status Launch();
  // Brings its results back; call Settle behind the end of the pass.
  absl::Status Collect();
  void Settle(uint64_t pass);

 private:
  // A launch's tables on the device, laid out as EvictResults lays them out, and its workspace.
  struct Area {
    int windows_max = 0;
    DeviceBuffer memory;
    DeviceBuffer workspace;
    EvictTable table;
  };

  WindowEvictor(const GpuWorkerParts& parts, std::shared_ptr<Timeline> timeline)
      : parts_(parts), timeline_(std::move(timeline)) {}
  absl::Status MakeArea(int windows_max, Area* area);
  // Adds the windows' pages to their sequences and writes `to`.
  std::vector<UnsettledPage> Fill(uint64_t pass, std::span<const DueWindow> windows,
                                  const EvictTable& to);
  // A window that is to be measured, and its page.
  struct SampledPage {
    std::shared_ptr<WindowSample> sample;
    std::shared_ptr<const DevicePage> page;
  };
  // Keeps the rows of the windows that are to be measured, pages[i] of windows[i].
  absl::Status HoldSamples(uint64_t pass, std::span<const DueWindow> windows,
                           std::span<const UnsettledPage> pages, std::vector<SampledPage>* sampled);
  void Measure(std::vector<SampledPage> sampled);
  absl::Status Upload(const EvictTable& from, const Area& area);
  absl::Status Launch(const Area& area, const RingShape& ring, kernels::PageFormat format);
  absl::Status Download(const Area& area, size_t windows, const EvictTable& to);
  // Of one kind of rows and one format.
  absl::Status EvictSome(std::span<const DueWindow> windows);

  const GpuWorkerParts& parts_;
  const std::shared_ptr<Timeline> timeline_;
  Area captured_;
  Area now_;
  PinnedBuffer none_;            // the table of a pass without windows: their number
  bool none_there_ = false;      // the device has it
  EvictResults::Table results_;  // of the pass under way; null without windows
  std::vector<UnsettledPage> pages_;
  std::vector<SampledPage> sampled_;
};

}  // namespace crumb::client
