// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "client/cpu/cpu_backend.h"
#include "client/worker/page_pool.h"
#include "client/worker/page_sink.h"
#include "client/worker/page_table.h"
#include "client/worker/quality_watch.h"
#include "client/worker/segment_rule.h"
#include "client/worker/worker_tally.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// What the sequences of one worker share. Everything is borrowed from the worker.
struct SequenceParts {
  const WorkerOptions& options;
  SegmentRule rule;
  const CpuBackend& backend;
  PagePool& pool;
  PageTable& table;
  PageSink& sink;
  QualityWatch& watch;
  WorkerTally& tally;
};

}  // namespace crumb::client
