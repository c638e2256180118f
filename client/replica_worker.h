// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "client/keyspace_binding.h"
#include "client/sequence_parts.h"
#include "client/three_segment_sequence.h"
#include "crumb/worker.h"

namespace crumb::client {

// See Worker for the contract.
class ReplicaWorker final : public Worker {
 public:
  ReplicaWorker(const WorkerOptions& options, Client* client, const KeyspaceId& private_keyspace);

  absl::StatusOr<std::unique_ptr<Sequence>> Begin(std::span<const int32_t> tokens,
                                                  const SequenceOptions& options) override;
  absl::Status WaitPublished(Duration timeout) override;
  const WorkerOptions& options() const override { return options_; }
  WorkerCounters counters() const override { return tally_.Read(); }

 private:
  SequenceParts Parts();
  void FindShared(SequenceStart& start, int pages_max);

  const WorkerOptions options_;
  const SegmentRule rule_;
  const std::shared_ptr<const KeyspaceBinding> private_keyspace_;
  const CpuBackend backend_;
  PagePool pool_;
  PageTable table_;
  WorkerTally tally_;
  std::unique_ptr<PageSink> sink_;
};

}  // namespace crumb::client
