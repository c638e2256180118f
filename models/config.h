// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace crumb::models {

// The parameters of rotary position embedding (RoPE).
struct RopeConfig {
  enum class Kind { kDefault, kLinear, kYarn };

  Kind kind = Kind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;  // extension of the context; kLinear and kYarn
  // The members below belong to kYarn.
  int original_max_positions = 0;
  double beta_fast = 32.0;  // rotations in the original context above which a pair is unchanged
  double beta_slow = 1.0;   // rotations below which a pair is extended by `factor`
  double attention_factor = 1.0;  // multiplies sine and cosine
};

// The parameters of a Qwen3-architecture model, as in config.json of an HF directory.
struct ModelConfig {
  int vocab_size = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int layers = 0;
  int q_heads = 0;
  int kv_heads = 0;  // divides q_heads
  int head_dim = 0;  // even
  int max_positions = 0;
  float rms_norm_eps = 0.0f;
  bool tied_embeddings = false;
  bool attention_bias = false;  // the projections q, k, v and o have biases
  RopeConfig rope;
  std::vector<int32_t> eos_ids;  // tokens that end a generation; sorted, may be empty
};

// Reads `dir`/config.json, and the end-of-sequence ids of `dir`/generation_config.json if that file
// exists. kNotFound: no config.json. kInvalidArgument: a field is missing or out of range, or the
// model needs a feature that the engine lacks (another architecture, sliding windows, another
// activation or kind of RoPE scaling); the message names the value and the supported ones.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir);

// Reads RoPE from the fields of a config.json: rope_theta, rope_scaling or rope_parameters.
// Messages name `where`. kInvalidArgument: a field is missing or has a value that is not supported.
absl::StatusOr<RopeConfig> ParseRopeConfig(const nlohmann::json& fields, const std::string& where);

}  // namespace crumb::models
