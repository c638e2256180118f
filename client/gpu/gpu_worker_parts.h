// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "client/gpu/device/background.h"
#include "client/gpu/device/device.h"
#include "client/gpu/device_constants.h"
#include "client/gpu/device_geometry.h"
#include "client/gpu/evict_results.h"
#include "client/gpu/page_settler.h"
#include "client/gpu/pools/slot_pool.h"
#include "client/gpu/window_watch.h"
#include "client/worker/sequence_starter.h"
#include "crumb/device_options.h"
#include "crumb/worker_options.h"

namespace crumb::client {

class PageScrubber;

// The parts of a GPU worker that all of its batches and sequences use. Everything is borrowed from
// the worker.
//
// It exists so that sequences and batches need not know GpuWorker.
struct GpuWorkerParts {
  Device& device;
  const WorkerOptions& options;
  const DeviceWorkerOptions& device_options;
  const DeviceGeometry& geometry;
  const RingShape& decode_ring;
  const RingShape& prompt_ring;
  const DeviceConstants& constants;
  SequenceStarter& starter;
  TimelineSet& timelines;
  SlotPool& pages;
  SlotPool& bf16_pages;
  SlotPool& sinks;
  SlotPool& decode_rings;
  SlotPool& prompt_rings;
  EvictResults& results;
  PageSettler& settler;
  WindowWatch* watch;            // null: quality is not watched
  const PageScrubber* scrubber;  // null: there is no scrubbing

  // Returns the slots of history pages of this format.
  SlotPool& PagesOf(kernels::PageFormat format) const {
    return format == kernels::PageFormat::kBf16 ? bf16_pages : pages;
  }
};

}  // namespace crumb::client
