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

// One request: a sequence of the worker, and the model that makes its keys and values.
class RunningSequence {
 public:
  virtual ~RunningSequence() = default;

  virtual int cached_tokens() const = 0;
  // Runs `tokens` through the model behind what the sequence holds. kDataLoss: cached pages were
  // damaged, the sequence is to be dropped.
  virtual absl::StatusOr<models::Logits> Forward(std::span<const int32_t> tokens,
                                                 models::LogitRows rows) = 0;
  virtual client::SequenceStats stats() const = 0;
  // Publishes its full pages.
  virtual absl::Status Finish() = 0;
};

// A model and the worker for its KV cache, on one kind of device. Not thread-safe.
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

// The model of the HF directory `model` on the first GPU. kFailedPrecondition: built without CUDA;
// kUnavailable: no driver, no GPU or no cuBLAS.
absl::StatusOr<std::unique_ptr<Runner>> OpenCudaRunner(const std::string& model,
                                                       const client::WorkerOptions& options,
                                                       client::Client* client);

}  // namespace crumb::tiny_lm
