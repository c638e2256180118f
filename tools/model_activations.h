// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calibration/activation_source.h"
#include "models/engine.h"

namespace crumb::tools {

// Runs a Qwen3-architecture model over texts and hands out its activations, sequence by sequence.
// Sequences are cut from all texts one behind the other; of more text than is to be read they are
// evenly spread.
class ModelActivations : public calibration::ActivationSource {
 public:
  struct Options {
    std::string model;               // HF directory
    std::vector<std::string> texts;  // files, one after the other
    int context = 1024;              // tokens of one sequence
    int tokens = 32768;              // at most
    int threads = 0;                 // 0: one per CPU
  };

  // Errors of Engine::Load and Tokenizer::Load. kInvalidArgument: a context beyond the model's, or
  // texts too short for one sequence; kNotFound: a text that is not there.
  static absl::StatusOr<std::unique_ptr<ModelActivations>> Open(const Options& options);

  const calibration::ModelShape& shape() const override { return shape_; }
  const models::ModelConfig& config() const { return engine_->config(); }
  // Of all sequences together.
  int64_t tokens() const;
  // Every layer of a sequence is computed whichever is asked for.
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

}  // namespace crumb::tools
