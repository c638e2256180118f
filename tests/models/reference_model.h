// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "tests/models/model_folder.h"

namespace crumb::models {

// A small Qwen3 model with tied embeddings and random f32 weights: what a config.json says, and its
// tensors. Biases of q, k, v and o are as large as what they are added to.
struct SmallModel {
  nlohmann::json config;
  RawTensors tensors;
};
SmallModel RandomSmallModel(bool attention_bias, uint32_t seed);

// Writes it to `folder`.
void WriteModel(const SmallModel& model, const ModelFolder& folder);

// All logits of `tokens`, [tokens, vocab], in double precision, apart from the code under test: one
// token after the other, loops over scalars. q, k and v are rounded to bf16 where they enter
// attention.
std::vector<double> ReferenceLogits(const SmallModel& model, std::span<const int32_t> tokens);

// ||a - b|| / ||b||.
double RelativeDifference(std::span<const float> a, std::span<const double> b);

}  // namespace crumb::models
