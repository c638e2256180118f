// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/weights.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace crumb::models {

namespace {

absl::Status LoadMatrix(const Checkpoint& checkpoint, const std::string& name, int64_t rows,
                        int64_t columns, Matrix* matrix) {
  CRUMB_ASSIGN_OR_RETURN(const Tensor tensor, checkpoint.Find(name, {rows, columns}));
  *matrix = Matrix::Of(tensor);
  return absl::OkStatus();
}

absl::Status LoadVector(const Checkpoint& checkpoint, const std::string& name, int64_t size,
                        std::vector<float>* vector) {
  CRUMB_ASSIGN_OR_RETURN(const Tensor tensor, checkpoint.Find(name, {size}));
  *vector = ToFloats(tensor);
  return absl::OkStatus();
}

absl::Status LoadBiases(const Checkpoint& checkpoint, const ModelConfig& config,
                        const std::string& prefix, LayerWeights* layer) {
  const int64_t kv_size = int64_t{config.kv_heads} * config.head_dim;
  const struct {
    const char* name;
    bool present;
    int64_t size;
    std::vector<float>* vector;
  } biases[] = {
      {"q_proj", config.qkv_bias, int64_t{config.q_heads} * config.head_dim, &layer->q_bias},
      {"k_proj", config.qkv_bias, kv_size, &layer->k_bias},
      {"v_proj", config.qkv_bias, kv_size, &layer->v_bias},
      {"o_proj", config.o_bias, config.hidden_size, &layer->o_bias}};
  for (const auto& b : biases) {
    if (!b.present) continue;
    CRUMB_RETURN_IF_ERROR(LoadVector(
        checkpoint, absl::StrCat(prefix, "self_attn.", b.name, ".bias"), b.size, b.vector));
  }
  return absl::OkStatus();
}

absl::Status LoadLayer(const Checkpoint& checkpoint, const ModelConfig& config, int index,
                       LayerWeights* layer) {
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  const int64_t hidden = config.hidden_size;
  const int64_t q_size = int64_t{config.q_heads} * config.head_dim;
  const int64_t kv_size = int64_t{config.kv_heads} * config.head_dim;
  const struct {
    const char* name;
    int64_t rows;
    int64_t columns;
    Matrix* matrix;
  } matrices[] = {{"self_attn.q_proj", q_size, hidden, &layer->q_proj},
                  {"self_attn.k_proj", kv_size, hidden, &layer->k_proj},
                  {"self_attn.v_proj", kv_size, hidden, &layer->v_proj},
                  {"self_attn.o_proj", hidden, q_size, &layer->o_proj},
                  {"mlp.gate_proj", config.intermediate_size, hidden, &layer->gate_proj},
                  {"mlp.up_proj", config.intermediate_size, hidden, &layer->up_proj},
                  {"mlp.down_proj", hidden, config.intermediate_size, &layer->down_proj}};
  for (const auto& m : matrices) {
    CRUMB_RETURN_IF_ERROR(LoadMatrix(checkpoint, absl::StrCat(prefix, m.name, ".weight"), m.rows,
                                     m.columns, m.matrix));
  }
  const struct {
    const char* name;
    bool present;
    int64_t size;
    std::vector<float>* vector;
  } vectors[] = {{"input_layernorm", true, hidden, &layer->attention_norm},
                 {"post_attention_layernorm", true, hidden, &layer->mlp_norm},
                 {"self_attn.q_norm", config.qk_norm, config.head_dim, &layer->q_norm},
                 {"self_attn.k_norm", config.qk_norm, config.head_dim, &layer->k_norm}};
  for (const auto& v : vectors) {
    if (!v.present) continue;
    CRUMB_RETURN_IF_ERROR(
        LoadVector(checkpoint, absl::StrCat(prefix, v.name, ".weight"), v.size, v.vector));
  }
  return LoadBiases(checkpoint, config, prefix, layer);
}

}  // namespace

absl::StatusOr<Weights> Weights::Load(const std::string& dir, const ModelConfig& config) {
  Weights weights;
  CRUMB_ASSIGN_OR_RETURN(weights.checkpoint, Checkpoint::Open(dir));
  const Checkpoint& checkpoint = *weights.checkpoint;
  CRUMB_RETURN_IF_ERROR(LoadMatrix(checkpoint, "model.embed_tokens.weight", config.vocab_size,
                                   config.hidden_size, &weights.embedding));
  CRUMB_RETURN_IF_ERROR(
      LoadVector(checkpoint, "model.norm.weight", config.hidden_size, &weights.final_norm));
  if (!config.tied_embeddings) {
    CRUMB_RETURN_IF_ERROR(LoadMatrix(checkpoint, "lm_head.weight", config.vocab_size,
                                     config.hidden_size, &weights.output_proj));
  }
  // Layers are added one by one, so that a configuration with far more layers than the files have
  // fails before it takes memory.
  for (int i = 0; i < config.layers; ++i) {
    CRUMB_RETURN_IF_ERROR(LoadLayer(checkpoint, config, i, &weights.layers.emplace_back()));
  }
  return weights;
}

}  // namespace crumb::models
