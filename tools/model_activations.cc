// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/model_activations.h"

#include <algorithm>
#include <filesystem>

#include "common/json_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "models/dense_kv_cache.h"
#include "models/rope.h"
#include "models/tokenizer.h"

namespace crumb::tools {
namespace {

constexpr int64_t kTextBytesMax = int64_t{1} << 30;

// Exact keys and values of one sequence, that show each layer's activations to a visitor. The whole
// sequence goes through the layers together.
class VisitedCache : public models::KvCache {
 public:
  VisitedCache(const models::Engine& engine, const calibration::ActivationSource::Visitor& visit)
      : dense_(engine.config(), engine.pool()),
        row_elements_(size_t{1} * engine.config().kv_heads * engine.config().head_dim),
        visit_(visit) {}

  int length() const override { return dense_.length(); }
  absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                      const kernels::Bf16* v) override {
    k_.assign(k, k + tokens * row_elements_);
    v_.assign(v, v + tokens * row_elements_);
    return dense_.Append(layer, tokens, k, v);
  }
  absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) override {
    CRUMB_RETURN_IF_ERROR(
        visit_({.layer = layer, .tokens = tokens, .q = q, .k = k_.data(), .v = v_.data()}));
    return dense_.Attend(layer, tokens, q, out);
  }
  absl::Status Advance(std::span<const int32_t> tokens) override { return dense_.Advance(tokens); }

 private:
  models::DenseKvCache dense_;
  const size_t row_elements_;
  const calibration::ActivationSource::Visitor& visit_;
  std::vector<kernels::Bf16> k_, v_;  // of the layer that is to attend
};

calibration::ModelShape ShapeOf(const std::string& dir, const models::ModelConfig& config) {
  const models::Rope rope(config.rope, config.head_dim);
  return {.name = std::filesystem::path(dir + "/").parent_path().filename().string(),
          .rope = models::DescribeRope(config.rope),
          .layers = config.layers,
          .q_heads = config.q_heads,
          .kv_heads = config.kv_heads,
          .head_dim = config.head_dim,
          .rotary = calibration::HalfSplitPairs(config.head_dim, rope.frequencies())};
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelActivations>> ModelActivations::Open(const Options& options) {
  auto source = std::unique_ptr<ModelActivations>(new ModelActivations());
  CRUMB_ASSIGN_OR_RETURN(const auto tokenizer, models::Tokenizer::Load(options.model));
  CRUMB_ASSIGN_OR_RETURN(source->engine_,
                         models::Engine::Load(options.model, {.threads = options.threads,
                                                              .chunk_tokens = options.context}));
  const models::ModelConfig& config = source->engine_->config();
  if (options.context > config.max_positions) {
    return absl::InvalidArgumentError(fmt::format("{}: sequences of {} tokens, it has {} positions",
                                                  options.model, options.context,
                                                  config.max_positions));
  }
  source->shape_ = ShapeOf(options.model, config);
  std::vector<int32_t> ids;
  for (const std::string& path : options.texts) {
    CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kTextBytesMax));
    const std::vector<int32_t> more = tokenizer->Encode(text);
    ids.insert(ids.end(), more.begin(), more.end());
  }
  const int64_t there = static_cast<int64_t>(ids.size()) / options.context;
  const int64_t taken = std::min<int64_t>(there, options.tokens / options.context);
  for (int64_t i = 0; i < taken; ++i) {
    const auto begin = ids.begin() + i * there / taken * options.context;
    source->sequences_.emplace_back(begin, begin + options.context);
  }
  if (source->sequences_.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("the texts have {} tokens and {} are to be read, less than one sequence of {}",
                    ids.size(), options.tokens, options.context));
  }
  return source;
}

int64_t ModelActivations::tokens() const {
  int64_t tokens = 0;
  for (const auto& sequence : sequences_) tokens += static_cast<int64_t>(sequence.size());
  return tokens;
}

absl::Status ModelActivations::ForEach(int first, int count, const Visitor& visit) {
  const Visitor visit_asked = [&](const calibration::SequenceActivations& sequence) {
    const bool asked = sequence.layer >= first && sequence.layer < first + count;
    return asked ? visit(sequence) : absl::OkStatus();
  };
  for (const std::vector<int32_t>& sequence : sequences_) {
    VisitedCache cache(*engine_, visit_asked);
    CRUMB_RETURN_IF_ERROR(engine_->Forward(cache, sequence, models::LogitRows::kLast).status());
  }
  return absl::OkStatus();
}

}  // namespace crumb::tools
