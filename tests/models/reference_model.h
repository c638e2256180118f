// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "tests/models/model_folder.h"

namespace crumb::models {

// A small Qwen3 model with tied embeddings and random f32 weights: the fields of its config.json,
// and its tensors. The biases of q, k, v and o are as large as the values to which they are added.
struct SmallModel {
  nlohmann::json config;
  RawTensors tensors;
};
SmallModel RandomSmallModel(bool attention_bias, uint32_t seed);

// Writes the model to `folder`.
void WriteModel(const SmallModel& model, const ModelFolder& folder);

// Returns all logits of `tokens`, [tokens, vocab], in double precision and independently of the
// code under test, token by token with loops over scalars. q, k and v are rounded to bf16 before
// attention.
std::vector<double> ReferenceLogits(const SmallModel& model, std::span<const int32_t> tokens);

// ||a - b|| / ||b||.
double RelativeDifference(std::span<const float> a, std::span<const double> b);

}  // namespace crumb::models
