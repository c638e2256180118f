// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/json_file.h"
#include "common/status_macros.h"

namespace crumb::models {

namespace {

// The largest size in a config.json: far above published models, and products of two fit 64 bits.
constexpr int64_t kSizeMax = int64_t{1} << 24;

absl::Status Unsupported(const std::string& where, const std::string& what,
                         const std::string& found, const std::string& supported) {
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": ", what, " ", found, " is not supported, only ", supported));
}

// How a family of models differs from the others.
struct Family {
  const char* architecture;
  bool qk_norm;
  enum class Bias {
    kQkv,         // q, k and v always have biases, o never has one
    kAsInConfig,  // the field attention_bias applies to q, k, v and o
  } bias;
};
constexpr Family kFamilies[] = {
    {"LlamaForCausalLM", false, Family::Bias::kAsInConfig},
    {"Qwen2ForCausalLM", false, Family::Bias::kQkv},
    {"Qwen3ForCausalLM", true, Family::Bias::kAsInConfig},
};
// The RoPE base of Llama models whose config.json does not state one, as Llama 2's.
constexpr double kLlamaTheta = 10000.0;

absl::StatusOr<const Family*> ReadFamily(const nlohmann::json& json, const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* names, ArrayField(json, "architectures", where));
  std::string known;
  for (const Family& family : kFamilies) {
    if (names->size() == 1 && (*names)[0] == family.architecture) return &family;
    absl::StrAppend(&known, known.empty() ? "" : ", ", family.architecture);
  }
  return Unsupported(where, "architecture", names->dump(), known);
}

absl::Status CheckFeatures(const nlohmann::json& json, const std::string& where) {
  if (HasField(json, "hidden_act") && json["hidden_act"] != "silu") {
    return Unsupported(where, "hidden_act", json["hidden_act"].dump(), "\"silu\"");
  }
  CRUMB_ASSIGN_OR_RETURN(const bool window, BoolField(json, "use_sliding_window", false, where));
  if (window) return Unsupported(where, "use_sliding_window", "true", "false");
  for (const char* key : {"mlp_bias", "rope_interleaved"}) {
    CRUMB_ASSIGN_OR_RETURN(const bool set, BoolField(json, key, false, where));
    if (set) return Unsupported(where, key, "true", "false");
  }
  if (HasField(json, "layer_types")) {
    CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* types, ArrayField(json, "layer_types", where));
    for (const nlohmann::json& type : *types) {
      if (type != "full_attention") {
        return Unsupported(where, "layer_types with", type.dump(), "\"full_attention\"");
      }
    }
  }
  if (HasField(json, "quantization_config")) {
    return Unsupported(where, "quantization_config", "(quantized weights)", "bf16, f16 or f32");
  }
  return absl::OkStatus();
}

// `json` is the object with the fields of the scaling.
absl::Status ReadYarn(const nlohmann::json& json, const std::string& where, RopeConfig* rope) {
  CRUMB_ASSIGN_OR_RETURN(rope->original_max_positions,
                         IntField(json, "original_max_position_embeddings", 1, kSizeMax, where));
  for (const char* key : {"mscale", "mscale_all_dim"}) {
    if (HasField(json, key)) return Unsupported(where, "yarn field", key, "plain yarn");
  }
  CRUMB_ASSIGN_OR_RETURN(const bool truncate, BoolField(json, "truncate", true, where));
  if (!truncate) return Unsupported(where, "yarn field truncate", "false", "true");
  if (HasField(json, "beta_fast")) {
    CRUMB_ASSIGN_OR_RETURN(rope->beta_fast, PositiveField(json, "beta_fast", where));
  }
  if (HasField(json, "beta_slow")) {
    CRUMB_ASSIGN_OR_RETURN(rope->beta_slow, PositiveField(json, "beta_slow", where));
  }
  if (HasField(json, "attention_factor")) {
    CRUMB_ASSIGN_OR_RETURN(rope->attention_factor, PositiveField(json, "attention_factor", where));
  } else {
    rope->attention_factor = rope->factor > 1.0 ? 0.1 * std::log(rope->factor) + 1.0 : 1.0;
  }
  return absl::OkStatus();
}

// `json` is the object with the fields of the scaling.
absl::Status ReadLlama3(const nlohmann::json& json, const std::string& where, RopeConfig* rope) {
  CRUMB_ASSIGN_OR_RETURN(rope->original_max_positions,
                         IntField(json, "original_max_position_embeddings", 1, kSizeMax, where));
  CRUMB_ASSIGN_OR_RETURN(rope->low_frequency_factor, PositiveField(json, "low_freq_factor", where));
  CRUMB_ASSIGN_OR_RETURN(rope->high_frequency_factor,
                         PositiveField(json, "high_freq_factor", where));
  if (rope->low_frequency_factor < rope->high_frequency_factor) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": low_freq_factor ", rope->low_frequency_factor,
                   " must be below high_freq_factor ", rope->high_frequency_factor));
}

absl::Status ReadSizes(const nlohmann::json& json, const std::string& where, ModelConfig* config) {
  const struct {
    const char* key;
    int* value;
  } sizes[] = {{"vocab_size", &config->vocab_size},
               {"hidden_size", &config->hidden_size},
               {"intermediate_size", &config->intermediate_size},
               {"num_hidden_layers", &config->layers},
               {"num_attention_heads", &config->q_heads},
               {"max_position_embeddings", &config->max_positions}};
  for (const auto& size : sizes) {
    CRUMB_ASSIGN_OR_RETURN(*size.value, IntField(json, size.key, 1, kSizeMax, where));
  }
  config->kv_heads = config->q_heads;
  if (HasField(json, "num_key_value_heads")) {
    CRUMB_ASSIGN_OR_RETURN(config->kv_heads,
                           IntField(json, "num_key_value_heads", 1, kSizeMax, where));
  }
  config->head_dim = config->hidden_size / config->q_heads;
  if (HasField(json, "head_dim")) {
    CRUMB_ASSIGN_OR_RETURN(config->head_dim, IntField(json, "head_dim", 1, kSizeMax, where));
  }
  if (config->head_dim < 2 || config->head_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": head_dim ", config->head_dim, " must be even for RoPE"));
  }
  if (config->q_heads % config->kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": num_attention_heads ", config->q_heads,
                                                   " must be a multiple of num_key_value_heads ",
                                                   config->kv_heads));
  }
  if (int64_t{config->q_heads} * config->head_dim > kSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": num_attention_heads * head_dim must be at most ", kSizeMax));
  }
  return absl::OkStatus();
}

// The ids are one integer or a list of integers.
absl::Status AddEosIds(const nlohmann::json& json, const std::string& where, int vocab_size,
                       std::vector<int32_t>* ids) {
  if (!HasField(json, "eos_token_id")) return absl::OkStatus();
  const nlohmann::json& field = json["eos_token_id"];
  const nlohmann::json list = field.is_array() ? field : nlohmann::json::array({field});
  for (const nlohmann::json& id : list) {
    const nlohmann::json holder = {{"eos_token_id", id}};
    CRUMB_ASSIGN_OR_RETURN(const int64_t value,
                           IntField(holder, "eos_token_id", 0, vocab_size - 1, where));
    ids->push_back(static_cast<int32_t>(value));
  }
  return absl::OkStatus();
}

}  // namespace

// Older files have rope_theta at the top level and rope_scaling, which may be null; newer ones have
// rope_parameters.
absl::StatusOr<RopeConfig> ParseRopeConfig(const nlohmann::json& json, const std::string& where) {
  RopeConfig rope;
  const bool newer = HasField(json, "rope_parameters");
  const char* key = newer ? "rope_parameters" : "rope_scaling";
  const bool has_scaling = newer || HasField(json, key);
  const nlohmann::json* scaling = nullptr;
  if (has_scaling) {
    CRUMB_ASSIGN_OR_RETURN(scaling, ObjectField(json, key, where));
  }
  const bool theta_inside = has_scaling && HasField(*scaling, "rope_theta");
  CRUMB_ASSIGN_OR_RETURN(rope.theta,
                         PositiveField(theta_inside ? *scaling : json, "rope_theta", where));
  if (!has_scaling) return rope;

  const char* type_key = HasField(*scaling, "rope_type") ? "rope_type" : "type";
  CRUMB_ASSIGN_OR_RETURN(const std::string type, StringField(*scaling, type_key, where));
  if (type == "default") return rope;
  if (type == "linear") {
    rope.kind = RopeConfig::Kind::kLinear;
  } else if (type == "yarn") {
    rope.kind = RopeConfig::Kind::kYarn;
  } else if (type == "llama3") {
    rope.kind = RopeConfig::Kind::kLlama3;
  } else {
    return Unsupported(where, "rope scaling type", "\"" + type + "\"",
                       "default, linear, yarn and llama3");
  }
  CRUMB_ASSIGN_OR_RETURN(rope.factor, PositiveField(*scaling, "factor", where));
  if (rope.kind == RopeConfig::Kind::kYarn) {
    CRUMB_RETURN_IF_ERROR(ReadYarn(*scaling, where, &rope));
  }
  if (rope.kind == RopeConfig::Kind::kLlama3) {
    CRUMB_RETURN_IF_ERROR(ReadLlama3(*scaling, where, &rope));
  }
  return rope;
}

namespace {

absl::StatusOr<RopeConfig> ReadRope(const nlohmann::json& json, const Family& family,
                                    const std::string& where) {
  if (std::string_view(family.architecture) != "LlamaForCausalLM" || HasField(json, "rope_theta") ||
      HasField(json, "rope_parameters")) {
    return ParseRopeConfig(json, where);
  }
  nlohmann::json fields = json;
  fields["rope_theta"] = kLlamaTheta;
  return ParseRopeConfig(fields, where);
}

}  // namespace

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir) {
  const std::string where = dir + "/config.json";
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonObject(where));
  CRUMB_ASSIGN_OR_RETURN(const Family* family, ReadFamily(json, where));
  CRUMB_RETURN_IF_ERROR(CheckFeatures(json, where));
  ModelConfig config;
  config.qk_norm = family->qk_norm;
  CRUMB_RETURN_IF_ERROR(ReadSizes(json, where, &config));
  CRUMB_ASSIGN_OR_RETURN(const double eps, PositiveField(json, "rms_norm_eps", where));
  config.rms_norm_eps = static_cast<float>(eps);
  CRUMB_ASSIGN_OR_RETURN(config.tied_embeddings,
                         BoolField(json, "tie_word_embeddings", false, where));
  CRUMB_ASSIGN_OR_RETURN(const bool bias, BoolField(json, "attention_bias", false, where));
  config.qkv_bias = bias || family->bias == Family::Bias::kQkv;
  config.o_bias = bias && family->bias == Family::Bias::kAsInConfig;
  CRUMB_ASSIGN_OR_RETURN(config.rope, ReadRope(json, *family, where));
  if (config.rope.kind == RopeConfig::Kind::kYarn) {
    const double stretched = config.rope.factor * config.rope.original_max_positions;
    config.max_positions =
        static_cast<int>(std::clamp(stretched, double{1} * config.max_positions, double{kSizeMax}));
  }
  CRUMB_RETURN_IF_ERROR(AddEosIds(json, where, config.vocab_size, &config.eos_ids));
  const std::string generation = dir + "/generation_config.json";
  if (std::error_code error; std::filesystem::exists(generation, error)) {
    CRUMB_ASSIGN_OR_RETURN(const nlohmann::json extra, ReadJsonObject(generation));
    CRUMB_RETURN_IF_ERROR(AddEosIds(extra, generation, config.vocab_size, &config.eos_ids));
  }
  std::sort(config.eos_ids.begin(), config.eos_ids.end());
  config.eos_ids.erase(std::unique(config.eos_ids.begin(), config.eos_ids.end()),
                       config.eos_ids.end());
  return config;
}

}  // namespace crumb::models
