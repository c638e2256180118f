// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calibration/activation_source.h"
#include "calibration/file_activations.h"
#include "models/engine.h"
#include "tools/command_line.h"

namespace crumb::tools {

// Runs a Llama, Qwen2 or Qwen3 model over texts and yields its activations, sequence by sequence.
// Sequences are cut from the concatenated texts; if there is more text than is needed, they are
// evenly spread.
class ModelActivations : public calibration::ActivationSource {
 public:
  struct Options {
    std::string model;               // HF directory
    std::vector<std::string> texts;  // files, one after the other
    int context = 1024;              // tokens of one sequence
    int tokens = 32768;              // tokens of all sequences at most
    int threads = 0;                 // 0: one per CPU
  };

  // Returns the errors of Engine::Load and Tokenizer::Load. kInvalidArgument: the context exceeds
  // the model's, or the texts are too short for one sequence; kNotFound: a text does not exist.
  static absl::StatusOr<std::unique_ptr<ModelActivations>> Open(const Options& options);

  const calibration::ModelShape& shape() const override { return shape_; }
  const models::ModelConfig& config() const { return engine_->config(); }
  // Returns the tokens of all sequences together.
  int64_t tokens() const;
  // A walk computes all layers of a sequence, whichever are requested.
  int layers_per_walk() const override { return shape_.layers; }
  int64_t visits() const override {
    return static_cast<int64_t>(sequences_.size()) * shape_.layers;
  }
  absl::Status ForEach(int first, int count, const Visitor& visit) override;
  models::ThreadPool& pool() const { return engine_->pool(); }

 private:
  ModelActivations() = default;

  calibration::ModelShape shape_;
  std::unique_ptr<models::Engine> engine_;
  std::vector<std::vector<int32_t>> sequences_;
};

// The activations of `crumb calibrate --activations`, and the context of their model.
struct ActivationFiles {
  std::unique_ptr<calibration::FileActivations> source;
  int max_positions = 0;  // 0: unknown
};

// Takes RoPE, name and longest context from the options, from the files' metadata, or from
// config.json of --model, in this order. kInvalidArgument: RoPE is not given, or does not fit the
// activations. Other errors are those of FileActivations::Open.
absl::StatusOr<ActivationFiles> OpenActivationFiles(const CalibrateCommand& command);

}  // namespace crumb::tools
