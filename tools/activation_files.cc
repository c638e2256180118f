// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/activation_files.h"

#include <filesystem>
#include <utility>

#include "common/json_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "models/config.h"
#include "models/rope.h"

namespace crumb::tools {
namespace {

constexpr int64_t kPositionsMax = 1 << 24;

// Fields as config.json has them; of a multimodal model its text part.
absl::StatusOr<nlohmann::json> ModelFields(const std::string& model) {
  if (model.empty()) return nlohmann::json::object();
  CRUMB_ASSIGN_OR_RETURN(nlohmann::json config, ReadJsonObject(model + "/config.json"));
  if (HasField(config, "text_config") && config["text_config"].is_object()) {
    return config["text_config"];
  }
  return config;
}

// Replaces `fields[name]` by what the text says, where it says something.
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
