// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoint.h"
#include "models/config.h"
#include "models/matmul.h"

namespace crumb::models {

// One decoder layer. Norm and bias vectors are f32.
struct LayerWeights {
  std::vector<float> attention_norm;  // [hidden]
  Matrix q_proj;                      // [q_heads * head_dim, hidden]
  Matrix k_proj;                      // [kv_heads * head_dim, hidden]
  Matrix v_proj;                      // [kv_heads * head_dim, hidden]
  Matrix o_proj;                      // [hidden, q_heads * head_dim]
  std::vector<float> q_bias;          // [rows of q_proj]; empty if there is none, like the others
  std::vector<float> k_bias;
  std::vector<float> v_bias;
  std::vector<float> o_bias;
  std::vector<float> q_norm;    // [head_dim]; empty without qk_norm
  std::vector<float> k_norm;    // [head_dim]; empty without qk_norm
  std::vector<float> mlp_norm;  // [hidden]
  Matrix gate_proj;             // [intermediate, hidden]
  Matrix up_proj;               // [intermediate, hidden]
  Matrix down_proj;             // [hidden, intermediate]
};

// All weights of a model. Matrices stay in the mapped checkpoint as they are stored, except f16
// ones, which are converted to f32. So bf16 and f32 weights take no memory of the process, and
// processes share the page cache.
struct Weights {
  // kNotFound: a tensor or file is missing. kInvalidArgument: a tensor has a wrong shape or dtype.
  static absl::StatusOr<Weights> Load(const std::string& dir, const ModelConfig& config);

  // Returns the matrix that yields logits.
  const Matrix& output() const { return output_proj.rows() > 0 ? output_proj : embedding; }

  std::unique_ptr<Checkpoint> checkpoint;
  Matrix embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;  // [hidden]
  Matrix output_proj;             // [vocab, hidden], empty when tied to the embedding
};

}  // namespace crumb::models
