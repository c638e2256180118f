// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "client/cpu/cpu_backend.h"
#include "client/cpu/cpu_sequence.h"
#include "client/worker/page_reader.h"
#include "client/worker/sequence_starter.h"
#include "crumb/client.h"
#include "crumb/worker.h"

namespace crumb::client {

// CpuWorker is the Worker that computes on the CPU: see Worker for the contract.
//
// It connects the parts: SequenceStarter finds prefixes and publishes, CpuBackend computes,
// CpuSequence has the state of a request. The worker itself has no lock and no thread.
class CpuWorker final : public Worker {
 public:
  // `client` is borrowed and may be null. kInvalidArgument: WorkerOptions::Validate fails.
  static absl::StatusOr<std::unique_ptr<CpuWorker>> Create(const WorkerOptions& options,
                                                           Client* client);

  absl::StatusOr<std::unique_ptr<Sequence>> Begin(std::span<const int32_t> tokens,
                                                  const SequenceOptions& options) override;
  absl::StatusOr<LedSequence> Lead(std::span<const int32_t> tokens,
                                   const SequenceOptions& options) override;
  absl::StatusOr<std::unique_ptr<Sequence>> Follow(std::string_view token,
                                                   std::span<const int32_t> tokens,
                                                   const SequenceOptions& options) override;
  absl::Status WaitPublished(Duration timeout) override { return starter_->WaitPublished(timeout); }
  const WorkerOptions& options() const override { return options_; }
  WorkerCounters counters() const override { return starter_->counters(); }

 private:
  explicit CpuWorker(const WorkerOptions& options) : options_(options), backend_(options_) {}

  const WorkerOptions options_;
  const CpuBackend backend_;
  HostPageReader reader_;
  std::unique_ptr<SequenceStarter> starter_;  // its thread uses everything above
  std::optional<CpuSequenceParts> parts_;     // set by Create
};

}  // namespace crumb::client
