// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares models whose q, k, v and o projections have biases with double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "models/engine.h"
#include "models/kv_cache.h"
#include "tests/models/model_folder.h"
#include "tests/models/reference_model.h"

namespace crumb::models {
namespace {

using ::testing::HasSubstr;

// The error of f32 sums and of single elements of q, k and v that they round to the other bf16.
constexpr double kTolerance = 2e-3;

std::vector<int32_t> Tokens() {
  std::vector<int32_t> tokens;
  for (int i = 0; i < 90; ++i) tokens.push_back((i * 37 + i * i) % 96);
  return tokens;
}

std::vector<float> EngineLogits(const SmallModel& model) {
  const ModelFolder folder;
  WriteModel(model, folder);
  const auto engine = Engine::Load(folder.path(), {.threads = 2, .chunk_tokens = 40});
  EXPECT_TRUE(engine.ok()) << engine.status();
  if (!engine.ok()) return {};
  DenseKvCache cache((*engine)->config(), (*engine)->pool());
  const auto logits = (*engine)->Forward(cache, Tokens(), LogitRows::kAll);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return logits.ok() ? logits->values : std::vector<float>();
}

TEST(AttentionBiasTest, LogitsAreTheReferences) {
  for (const bool bias : {false, true}) {
    SCOPED_TRACE(bias);
    const SmallModel model = RandomSmallModel(bias, 11);
    const std::vector<double> expected = ReferenceLogits(model, Tokens());
    const std::vector<float> got = EngineLogits(model);
    ASSERT_EQ(got.size(), expected.size());
    EXPECT_LT(RelativeDifference(got, expected), kTolerance);
  }
}

// Shows that the test above would detect a bias that the engine omitted.
TEST(AttentionBiasTest, EachBiasMatters) {
  const SmallModel model = RandomSmallModel(true, 11);
  const std::vector<float> got = EngineLogits(model);
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    SmallModel without = model;
    const std::string bias = std::string("model.layers.1.self_attn.") + name + ".bias";
    ASSERT_EQ(without.tensors.erase(bias), 1u);
    EXPECT_GT(RelativeDifference(got, ReferenceLogits(without, Tokens())), 10 * kTolerance) << name;
  }
}

TEST(AttentionBiasTest, AMissingBiasAndAWrongShapeAreNamed) {
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    SmallModel model = RandomSmallModel(true, 12);
    const std::string bias = std::string("model.layers.1.self_attn.") + name + ".bias";
    const ModelFolder folder;
    model.tensors[bias].bytes.resize(12);
    model.tensors[bias].shape = {3};
    WriteModel(model, folder);
    const absl::Status wrong = Engine::Load(folder.path(), {}).status();
    EXPECT_EQ(wrong.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(wrong.message()), HasSubstr(bias));
    model.tensors.erase(bias);
    WriteModel(model, folder);
    const absl::Status missing = Engine::Load(folder.path(), {}).status();
    EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(missing.message()), HasSubstr(bias));
  }
}

}  // namespace
}  // namespace crumb::models
