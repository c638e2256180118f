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
  std::vector<float> q_bias;          // as many as the matrix has rows; empty: no biases
  std::vector<float> k_bias;
  std::vector<float> v_bias;
  std::vector<float> o_bias;
  std::vector<float> q_norm;    // [head_dim]
  std::vector<float> k_norm;    // [head_dim]
  std::vector<float> mlp_norm;  // [hidden]
  Matrix gate_proj;             // [intermediate, hidden]
  Matrix up_proj;               // [intermediate, hidden]
  Matrix down_proj;             // [hidden, intermediate]
};

// All weights of a model. Matrices stay in the mapped checkpoint as they are stored (f16 ones are
// copied to f32), so loading takes no memory for bf16 and f32 and processes share the page cache.
struct Weights {
  // kNotFound: a tensor or file is missing, named. kInvalidArgument: a wrong shape or dtype.
  static absl::StatusOr<Weights> Load(const std::string& dir, const ModelConfig& config);

  // The matrix that makes logits.
  const Matrix& output() const { return output_proj.rows() > 0 ? output_proj : embedding; }

  std::unique_ptr<Checkpoint> checkpoint;
  Matrix embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;  // [hidden]
  Matrix output_proj;             // [vocab, hidden], empty when tied to the embedding
};

}  // namespace crumb::models
