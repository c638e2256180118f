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
  enum class Kind { kDefault, kLinear, kYarn, kLlama3 };

  Kind kind = Kind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;             // extension of the context; all kinds but kDefault
  int original_max_positions = 0;  // kYarn and kLlama3
  // The next three members belong to kYarn.
  double beta_fast = 32.0;  // rotations in the original context above which a pair is unchanged
  double beta_slow = 1.0;   // rotations below which a pair is extended by `factor`
  double attention_factor = 1.0;  // multiplies sine and cosine
  // The next two members belong to kLlama3: rotations in the original context below which a pair is
  // extended by `factor`, and rotations above which it is unchanged.
  double low_frequency_factor = 1.0;
  double high_frequency_factor = 4.0;
};

// The parameters of a decoder of the Llama, Qwen2 or Qwen3 family, as in config.json of an HF
// directory. The families differ in two details only: which projections have biases, and whether
// queries and keys are normalised per head before RoPE.
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
  bool qk_norm = false;   // RMS norm of every head of q and k before RoPE
  bool qkv_bias = false;  // the projections q, k and v have biases
  bool o_bias = false;    // the projection o has a bias
  RopeConfig rope;
  std::vector<int32_t> eos_ids;  // tokens that end a generation; sorted, may be empty
};

// Reads `dir`/config.json, and the end-of-sequence ids of `dir`/generation_config.json if that file
// exists. kNotFound: no config.json. kInvalidArgument: a field is missing or out of range, or the
// model needs a feature that the engine lacks (another architecture, sliding windows, biases of the
// MLP, another activation or kind of RoPE scaling); the message names the value and the supported
// ones.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir);

// Reads RoPE from the fields of a config.json: rope_theta, rope_scaling or rope_parameters.
// Messages name `where`. kInvalidArgument: a field is missing or has a value that is not supported.
absl::StatusOr<RopeConfig> ParseRopeConfig(const nlohmann::json& fields, const std::string& where);

}  // namespace crumb::models
