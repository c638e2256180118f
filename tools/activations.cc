// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/activations.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "common/json_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "models/config.h"
#include "models/kv_cache.h"
#include "models/rope.h"
#include "models/tokenizer.h"

namespace crumb::tools {
namespace {

constexpr int64_t kTextBytesMax = int64_t{1} << 30;

// A cache of the exact keys and values of one sequence that passes each layer's activations to a
// visitor. The whole sequence passes through the layers together.
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
  std::vector<kernels::Bf16> k_, v_;  // rows of the layer that attends next
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
    return absl::InvalidArgumentError(
        fmt::format("{}: sequences of {} tokens are not possible, the model has {} positions",
                    options.model, options.context, config.max_positions));
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
  const Visitor visit_wanted = [&](const calibration::SequenceActivations& sequence) {
    const bool wanted = sequence.layer >= first && sequence.layer < first + count;
    return wanted ? visit(sequence) : absl::OkStatus();
  };
  for (const std::vector<int32_t>& sequence : sequences_) {
    VisitedCache cache(*engine_, visit_wanted);
    CRUMB_RETURN_IF_ERROR(engine_->Forward(cache, sequence, models::LogitRows::kLast).status());
  }
  return absl::OkStatus();
}

namespace {

constexpr int64_t kPositionsMax = 1 << 24;

// Returns the fields of a config.json; for a multimodal model, those of its text part.
absl::StatusOr<nlohmann::json> ModelFields(const std::string& model) {
  if (model.empty()) return nlohmann::json::object();
  CRUMB_ASSIGN_OR_RETURN(nlohmann::json config, ReadJsonObject(model + "/config.json"));
  if (HasField(config, "text_config") && config["text_config"].is_object()) {
    return config["text_config"];
  }
  return config;
}

// Replaces `fields[name]` by the JSON value of `text`, unless it is empty.
absl::Status Override(const std::string& name, const std::string& text, const std::string& where,
                      nlohmann::json& fields) {
  if (text.empty()) return absl::OkStatus();
  nlohmann::json value = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) {
    return absl::InvalidArgumentError(where + ": " + name + " \"" + text + "\" is not JSON");
  }
  if (name == "rope_scaling") fields.erase("rope_parameters");
  if (name == "rope_theta" && HasField(fields, "rope_parameters")) {
    fields["rope_parameters"]["rope_theta"] = std::move(value);
  } else {
    fields[name] = std::move(value);
  }
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::json> FieldsOf(const CalibrateCommand& command,
                                        const calibration::FileActivations& source) {
  CRUMB_ASSIGN_OR_RETURN(nlohmann::json fields, ModelFields(command.model));
  for (const char* name : {"rope_theta", "rope_scaling", "rotary_dim", "max_position_embeddings"}) {
    CRUMB_ASSIGN_OR_RETURN(const std::string text, source.Metadata(name));
    CRUMB_RETURN_IF_ERROR(Override(name, text, command.activations.front() + ": metadata", fields));
  }
  const std::string options = "options";
  CRUMB_RETURN_IF_ERROR(Override("rope_scaling", command.rope_scaling, options, fields));
  if (command.rope_theta) {
    CRUMB_RETURN_IF_ERROR(
        Override("rope_theta", fmt::format("{}", *command.rope_theta), options, fields));
  }
  if (command.rotary_dim) fields["rotary_dim"] = *command.rotary_dim;
  return fields;
}

absl::StatusOr<int> RotaryDim(const nlohmann::json& fields, int head_dim,
                              const std::string& where) {
  int64_t dim = head_dim;
  if (HasField(fields, "rotary_dim")) {
    CRUMB_ASSIGN_OR_RETURN(dim, IntField(fields, "rotary_dim", 0, head_dim, where));
  } else if (HasField(fields, "partial_rotary_factor")) {
    CRUMB_ASSIGN_OR_RETURN(const double part,
                           PositiveField(fields, "partial_rotary_factor", where));
    dim = static_cast<int64_t>(part * head_dim);
  }
  if (dim % 2 == 0 && dim <= head_dim) return static_cast<int>(dim);
  return absl::InvalidArgumentError(
      fmt::format("{}: {} rotary channels of {}", where, dim, head_dim));
}

absl::Status Describe(const CalibrateCommand& command, const nlohmann::json& fields,
                      calibration::FileActivations& source) {
  const std::string where = command.activations.front();
  const int head_dim = source.shape().head_dim;
  CRUMB_ASSIGN_OR_RETURN(std::string name, source.Metadata("model"));
  if (!command.model.empty()) {
    name = std::filesystem::path(command.model + "/").parent_path().filename().string();
  }
  if (!command.model_name.empty()) name = command.model_name;
  CRUMB_ASSIGN_OR_RETURN(const int rotary_dim, RotaryDim(fields, head_dim, where));
  if (rotary_dim == 0) {
    source.Describe(name, "none", calibration::HalfSplitPairs(head_dim, {}));
    return absl::OkStatus();
  }
  const auto config = models::ParseRopeConfig(fields, where);
  if (!config.ok()) {
    return absl::InvalidArgumentError(
        std::string(config.status().message()) +
        "; say how positions turn with --rope-theta, --rope-scaling, --rotary-dim (0: not at all), "
        "the files' metadata, or --model");
  }
  std::string rope = models::DescribeRope(*config);
  if (rotary_dim != head_dim) rope += fmt::format(" rotary_dim={}", rotary_dim);
  source.Describe(
      name, rope,
      calibration::HalfSplitPairs(head_dim, models::Rope(*config, rotary_dim).frequencies()));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ActivationFiles> OpenActivationFiles(const CalibrateCommand& command) {
  ActivationFiles files;
  CRUMB_ASSIGN_OR_RETURN(
      files.source, calibration::FileActivations::Open(command.activations, command.layer_ids));
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json fields, FieldsOf(command, *files.source));
  CRUMB_RETURN_IF_ERROR(Describe(command, fields, *files.source));
  if (HasField(fields, "max_position_embeddings")) {
    CRUMB_ASSIGN_OR_RETURN(
        files.max_positions,
        IntField(fields, "max_position_embeddings", 1, kPositionsMax, command.activations.front()));
  }
  return files;
}

}  // namespace crumb::tools
