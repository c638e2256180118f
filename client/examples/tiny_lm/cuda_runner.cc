// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "client/examples/tiny_lm/runner.h"
#include "common/page_key.h"
#include "common/status_macros.h"
#include "crumb/device_worker.h"
#include "models/cuda/engine.h"

namespace crumb::tiny_lm {
namespace {

using client::DeviceBatch;
using client::DeviceSequence;
using client::PassKind;

constexpr int kDevice = 0;
constexpr int kChunkTokens = 512;
constexpr int kSequences = 2;  // the running one, and one that it is compared with

// Stores the engine's keys and values in a device sequence. Everything is borrowed.
class DeviceSequenceCache : public models::cuda::DeviceKvCache {
 public:
  DeviceSequenceCache(DeviceBatch& prompts, DeviceBatch& decode, DeviceSequence& sequence,
                      int prompt_tokens)
      : prompts_(prompts), decode_(decode), sequence_(sequence), prompt_tokens_(prompt_tokens) {}

  int length() const override { return sequence_.length(); }
  int pass_tokens_max() const override {
    return sequence_.length() < prompt_tokens_ ? sequence_.pass_tokens_max() : 1;
  }
  absl::Status Start(int tokens) override {
    const client::PassEntry entry{&sequence_, tokens};
    CRUMB_RETURN_IF_ERROR(batch().Prepare({&entry, 1}));
    return batch().Start();
  }
  absl::Status Append(int layer, const kernels::Bf16* k, const kernels::Bf16* v) override {
    return batch().Append(layer, k, v);
  }
  absl::Status Attend(int layer, const kernels::Bf16* q, kernels::Bf16* out) override {
    return batch().Attend(layer, q, out);
  }
  absl::Status Advance(std::span<const int32_t> tokens) override {
    return batch().Advance({&tokens, 1});
  }

 private:
  DeviceBatch& batch() { return sequence_.length() < prompt_tokens_ ? prompts_ : decode_; }

  DeviceBatch& prompts_;
  DeviceBatch& decode_;
  DeviceSequence& sequence_;
  const int prompt_tokens_;
};

class CudaSequence : public RunningSequence {
 public:
  CudaSequence(models::cuda::Engine& engine, DeviceBatch& prompts, DeviceBatch& decode,
               std::unique_ptr<DeviceSequence> sequence, int prompt_tokens)
      : engine_(engine),
        decode_(decode),
        sequence_(std::move(sequence)),
        cache_(prompts, decode, *sequence_, prompt_tokens) {}

  int cached_tokens() const override { return sequence_->cached_tokens(); }
  absl::StatusOr<models::Logits> Forward(std::span<const int32_t> tokens,
                                         models::LogitRows rows) override {
    return engine_.Forward(cache_, tokens, rows);
  }
  client::SequenceStats stats() const override { return sequence_->stats(); }
  absl::Status Finish() override { return decode_.Finish(*sequence_); }

 private:
  models::cuda::Engine& engine_;
  DeviceBatch& decode_;
  std::unique_ptr<DeviceSequence> sequence_;
  DeviceSequenceCache cache_;
};

class CudaRunner : public Runner {
 public:
  absl::Status Open(const std::string& model, client::WorkerOptions options,
                    client::Client* client) {
    CRUMB_ASSIGN_OR_RETURN(engine_, models::cuda::Engine::Load(
                                        model, {.device = kDevice, .chunk_tokens = kChunkTokens}));
    CRUMB_ASSIGN_OR_RETURN(device_, client::OpenCudaDevice(kDevice));
    options.draft_slots = 0;
    const int pages = engine_->config().max_positions / kPageTokens + 1;
    CRUMB_ASSIGN_OR_RETURN(worker_, client::DeviceWorker::Open(options,
                                                               {.pages = pages * kSequences,
                                                                .sequences = kSequences,
                                                                .prompts = kSequences,
                                                                .loads = kSequences,
                                                                .load_pages = pages},
                                                               client, *device_));
    const auto stream = reinterpret_cast<client::DeviceStream>(engine_->stream());
    CRUMB_ASSIGN_OR_RETURN(prompts_, worker_->NewBatch({.stream = stream,
                                                        .kind = PassKind::kPrompt,
                                                        .sequences = 1,
                                                        .tokens = kChunkTokens,
                                                        .pages = pages}));
    CRUMB_ASSIGN_OR_RETURN(
        decode_,
        worker_->NewBatch(
            {.stream = stream, .kind = PassKind::kDecode, .sequences = 1, .pages = pages}));
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<RunningSequence>> Begin(
      std::span<const int32_t> prompt, const client::SequenceOptions& options) override {
    CRUMB_ASSIGN_OR_RETURN(auto sequence, worker_->Begin(prompt, options));
    return std::make_unique<CudaSequence>(*engine_, *prompts_, *decode_, std::move(sequence),
                                          static_cast<int>(prompt.size()));
  }
  absl::Status WaitPublished(Duration timeout) override { return worker_->WaitPublished(timeout); }
  const client::WorkerOptions& options() const override { return worker_->options(); }
  client::WorkerCounters counters() const override { return worker_->counters(); }

 private:
  // Each member uses those above it.
  std::unique_ptr<models::cuda::Engine> engine_;
  client::OpenDevice device_;
  std::unique_ptr<client::DeviceWorker> worker_;
  std::unique_ptr<DeviceBatch> prompts_;
  std::unique_ptr<DeviceBatch> decode_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Runner>> OpenCudaRunner(const std::string& model,
                                                       const client::WorkerOptions& options,
                                                       client::Client* client) {
  auto runner = std::make_unique<CudaRunner>();
  CRUMB_RETURN_IF_ERROR(runner->Open(model, options, client));
  return runner;
}

}  // namespace crumb::tiny_lm
