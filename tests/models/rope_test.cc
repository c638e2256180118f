// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/models/model_folder.h"

namespace crumb::models {
namespace {

// fixtures/make_fixtures.py computes these with the published implementation, whose f32 arithmetic
// differs in the last bits, mostly in YaRN's blend.
constexpr double kRelative = 1e-5;

TEST(RopeTest, FrequenciesAreThePublishedOnes) {
  nlohmann::json rows = ReadJson("tests/models/fixtures/rope.json");
  const nlohmann::json llama3 = ReadJson("tests/models/fixtures/rope3.json");
  rows.insert(rows.end(), llama3.begin(), llama3.end());
  ASSERT_GE(rows.size(), 7u);
  for (const nlohmann::json& row : rows) {
    SCOPED_TRACE(row["rope_parameters"].dump());
    ModelFolder folder;
    nlohmann::json json = ReadJson(std::string(kTinyLm) + "/config.json");
    json["rope_parameters"] = row["rope_parameters"];
    json["head_dim"] = row["head_dim"];
    folder.Write("config.json", json);
    const auto config = LoadModelConfig(folder.path());
    ASSERT_TRUE(config.ok()) << config.status();
    const Rope rope(config->rope, config->head_dim);
    const std::vector<double> expected = row["frequencies"];
    ASSERT_EQ(rope.frequencies().size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(rope.frequencies()[i], expected[i], kRelative * expected[i]) << i;
    }
    EXPECT_NEAR(config->rope.attention_factor, row["attention_factor"].get<double>(), 1e-9);
  }
}

TEST(RopeTest, TurnsPairsAHalfHeadApart) {
  RopeConfig config;
  config.theta = 100.0;
  const Rope rope(config, 4);
  float cosine[2];
  float sine[2];
  rope.At(3, cosine, sine);
  float row[4] = {1, 2, 3, 4};
  ApplyRope(cosine, sine, 4, row);
  const double slow = 3 * std::pow(100.0, -0.5);
  EXPECT_NEAR(row[0], 1 * std::cos(3.0) - 3 * std::sin(3.0), 1e-6);
  EXPECT_NEAR(row[2], 3 * std::cos(3.0) + 1 * std::sin(3.0), 1e-6);
  EXPECT_NEAR(row[1], 2 * std::cos(slow) - 4 * std::sin(slow), 1e-6);
  EXPECT_NEAR(row[3], 4 * std::cos(slow) + 2 * std::sin(slow), 1e-6);
}

TEST(RopeTest, ScalesByTheAttentionFactor) {
  RopeConfig config;
  config.attention_factor = 1.5;
  float cosine[1];
  float sine[1];
  Rope(config, 2).At(0, cosine, sine);
  EXPECT_FLOAT_EQ(cosine[0], 1.5f);
  EXPECT_FLOAT_EQ(sine[0], 0.0f);
}

}  // namespace
}  // namespace crumb::models
