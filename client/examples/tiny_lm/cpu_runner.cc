// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "client/examples/tiny_lm/runner.h"
#include "client/examples/tiny_lm/sequence_cache.h"
#include "common/status_macros.h"
#include "crumb/worker.h"

namespace crumb::tiny_lm {
namespace {

class CpuSequence : public RunningSequence {
 public:
  CpuSequence(const models::Engine& engine, std::unique_ptr<client::Sequence> sequence)
      : engine_(engine), sequence_(std::move(sequence)), cache_(*sequence_) {}

  int cached_tokens() const override { return sequence_->cached_tokens(); }
  absl::StatusOr<models::Logits> Forward(std::span<const int32_t> tokens,
                                         models::LogitRows rows) override {
    return engine_.Forward(cache_, tokens, rows);
  }
  client::SequenceStats stats() const override { return sequence_->stats(); }
  absl::Status Finish() override { return sequence_->Finish(); }

 private:
  const models::Engine& engine_;
  std::unique_ptr<client::Sequence> sequence_;
  SequenceCache cache_;
};

class CpuRunner : public Runner {
 public:
  CpuRunner(const models::Engine& engine, std::unique_ptr<client::Worker> worker)
      : engine_(engine), worker_(std::move(worker)) {}

  absl::StatusOr<std::unique_ptr<RunningSequence>> Begin(
      std::span<const int32_t> prompt, const client::SequenceOptions& options) override {
    CRUMB_ASSIGN_OR_RETURN(auto sequence, worker_->Begin(prompt, options));
    return std::make_unique<CpuSequence>(engine_, std::move(sequence));
  }
  absl::Status WaitPublished(Duration timeout) override { return worker_->WaitPublished(timeout); }
  const client::WorkerOptions& options() const override { return worker_->options(); }
  client::WorkerCounters counters() const override { return worker_->counters(); }

 private:
  const models::Engine& engine_;
  std::unique_ptr<client::Worker> worker_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Runner>> OpenCpuRunner(const models::Engine& engine,
                                                      const client::WorkerOptions& options,
                                                      client::Client* client) {
  CRUMB_ASSIGN_OR_RETURN(auto worker, client::Worker::Open(options, client));
  return std::make_unique<CpuRunner>(engine, std::move(worker));
}

}  // namespace crumb::tiny_lm
