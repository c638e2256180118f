// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "crumb/client.h"
#include "crumb/counters.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"
#include "models/engine.h"
#include "models/logits.h"

namespace crumb::tiny_lm {

// RunningSequence is one request: a sequence of the worker, and the model that computes its keys
// and values.
class RunningSequence {
 public:
  virtual ~RunningSequence() = default;

  virtual int cached_tokens() const = 0;
  // Runs `tokens` through the model behind the tokens that the sequence holds. kDataLoss: cached
  // pages were damaged; drop the sequence.
  virtual absl::StatusOr<models::Logits> Forward(std::span<const int32_t> tokens,
                                                 models::LogitRows rows) = 0;
  virtual client::SequenceStats stats() const = 0;
  // Publishes the sequence's full pages.
  virtual absl::Status Finish() = 0;
};

// Runner is a model and the worker for its KV cache, on one kind of device. Not thread-safe.
class Runner {
 public:
  virtual ~Runner() = default;

  // The sequence must not outlive the runner.
  virtual absl::StatusOr<std::unique_ptr<RunningSequence>> Begin(
      std::span<const int32_t> prompt, const client::SequenceOptions& options) = 0;
  virtual absl::Status WaitPublished(Duration timeout) = 0;
  virtual const client::WorkerOptions& options() const = 0;
  virtual client::WorkerCounters counters() const = 0;
};

// `engine` and `client` are borrowed; `client` may be null.
absl::StatusOr<std::unique_ptr<Runner>> OpenCpuRunner(const models::Engine& engine,
                                                      const client::WorkerOptions& options,
                                                      client::Client* client);

// Opens the model of the Hugging Face directory `model` on the first GPU. kFailedPrecondition: the
// program was built without CUDA; kUnavailable: there is no driver, no GPU or no cuBLAS.
absl::StatusOr<std::unique_ptr<Runner>> OpenCudaRunner(const std::string& model,
                                                       const client::WorkerOptions& options,
                                                       client::Client* client);

}  // namespace crumb::tiny_lm
