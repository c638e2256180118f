// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/examples/tiny_lm/prompt.h"
#include "client/examples/tiny_lm/run_options.h"
#include "client/examples/tiny_lm/run_report.h"
#include "client/examples/tiny_lm/runner.h"
#include "crumb/client.h"
#include "crumb/worker_options.h"
#include "models/engine.h"
#include "models/tokenizer.h"

namespace crumb::tiny_lm {

// Inference is a model, its tokenizer, and a Crumb worker for its KV cache, on the CPU or on a GPU.
// Not thread-safe.
class Inference {
 public:
  // Loads the model and connects to the store. Errors name file and field. The absence of crumbd is
  // no error: the run then has no cache.
  static absl::StatusOr<std::unique_ptr<Inference>> Open(const RunOptions& options);

  const models::Tokenizer& tokenizer() const { return *tokenizer_; }

  // Generates text for one prompt. kInvalidArgument: there are no tokens, or more than the model
  // has positions.
  absl::StatusOr<RunReport> Run(const Prompt& prompt);

 private:
  explicit Inference(const RunOptions& options) : options_(options) {}

  absl::Status OpenModel();
  absl::Status OpenStore();
  absl::StatusOr<client::WorkerOptions> MakeWorkerOptions() const;
  absl::Status SetQuantizer(client::WorkerOptions& worker) const;
  client::SequenceOptions MakeSequenceOptions(client::Publish publish) const;
  absl::StatusOr<std::vector<int32_t>> Generate(RunningSequence& sequence, const Prompt& prompt,
                                                RunReport& report);
  absl::StatusOr<Comparison> Compare(std::span<const int32_t> prompt,
                                     std::span<const int32_t> generated);
  absl::Status Publish(RunReport& report);

  const RunOptions options_;
  std::unique_ptr<models::Tokenizer> tokenizer_;
  std::unique_ptr<models::Engine> engine_;  // used on the CPU
  std::unique_ptr<client::Client> client_;  // null: there is no store
  std::unique_ptr<Runner> runner_;
};

}  // namespace crumb::tiny_lm
