// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace crumb::models {

// Rotary position embedding: how fast each pair of channels turns with the position.
struct RopeConfig {
  enum class Kind { kDefault, kLinear, kYarn };

  Kind kind = Kind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;  // by how much the context is stretched; kLinear and kYarn
  // kYarn only.
  int original_max_positions = 0;
  double beta_fast = 32.0;  // turns over the original context above which a pair is not stretched
  double beta_slow = 1.0;   // turns below which it is stretched in full
  double attention_factor = 1.0;  // multiplies sine and cosine
};

// What an HF directory's config.json says of a Qwen3-architecture model.
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
  bool attention_bias = false;  // the projections q, k, v and o have one each
  RopeConfig rope;
  std::vector<int32_t> eos_ids;  // ends a generation; sorted, may be empty
};

// Reads `dir`/config.json, and the end-of-sequence ids of `dir`/generation_config.json when that
// file is there. kNotFound: no config.json. kInvalidArgument: a field is missing or out of range,
// or the model needs something the engine does not do (another architecture, sliding windows,
// another activation or kind of RoPE scaling); the message says what was found and what is
// supported.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir);

// RoPE as the fields of a config.json say it: rope_theta, rope_scaling or rope_parameters. `where`
// is what messages call it. kInvalidArgument: a field is missing or of a kind that is not
// supported.
absl::StatusOr<RopeConfig> ParseRopeConfig(const nlohmann::json& fields, const std::string& where);

}  // namespace crumb::models
