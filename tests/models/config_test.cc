// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/models/model_folder.h"

namespace crumb::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Loads tiny-lm's config.json after `change`.
absl::StatusOr<ModelConfig> LoadChanged(const std::function<void(nlohmann::json&)>& change) {
  ModelFolder folder;
  nlohmann::json json = ReadJson(std::string(kTinyLm) + "/config.json");
  change(json);
  folder.Write("config.json", json);
  return LoadModelConfig(folder.path());
}

TEST(ConfigTest, ReadsTheCommittedModel) {
  const auto config = LoadModelConfig(kTinyLm);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->vocab_size, 4096);
  EXPECT_EQ(config->hidden_size, 256);
  EXPECT_EQ(config->intermediate_size, 768);
  EXPECT_EQ(config->layers, 4);
  EXPECT_EQ(config->q_heads, 4);
  EXPECT_EQ(config->kv_heads, 2);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_EQ(config->max_positions, 4096);
  EXPECT_FLOAT_EQ(config->rms_norm_eps, 1e-6f);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_TRUE(config->qk_norm);
  EXPECT_FALSE(config->qkv_bias);
  EXPECT_FALSE(config->o_bias);
  EXPECT_EQ(config->rope.theta, 1e6);
  EXPECT_EQ(config->rope.kind, RopeConfig::Kind::kDefault);
  EXPECT_THAT(config->eos_ids, ElementsAre(0));
}

// Adds Llama 3's scaling, with one of its fields changed.
std::function<void(nlohmann::json&)> Llama3(const std::string& key, const nlohmann::json& value) {
  return [=](nlohmann::json& json) {
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
    json["rope_scaling"][key] = value;
  };
}

TEST(ConfigTest, NamesWhatItDoesNotSupport) {
  struct Case {
    const char* name;
    std::function<void(nlohmann::json&)> change;
    std::vector<const char*> in_message;
  };
  const Case cases[] = {
      {"architecture",
       [](auto& j) { j["architectures"] = {"GemmaForCausalLM"}; },
       {"config.json", "GemmaForCausalLM", "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"}},
      {"two architectures",
       [](auto& j) {
         j["architectures"] = {"LlamaForCausalLM", "Qwen3ForCausalLM"};
       },
       {"LlamaForCausalLM"}},
      {"no architecture", [](auto& j) { j.erase("architectures"); }, {"architectures"}},
      {"activation", [](auto& j) { j["hidden_act"] = "gelu"; }, {"hidden_act", "gelu", "silu"}},
      {"bias", [](auto& j) { j["attention_bias"] = "yes"; }, {"attention_bias"}},
      {"window", [](auto& j) { j["use_sliding_window"] = true; }, {"use_sliding_window"}},
      {"window of some layers",
       [](auto& j) {
         j["layer_types"] = {"full_attention", "sliding_attention"};
       },
       {"layer_types", "sliding_attention"}},
      {"bias of the MLP", [](auto& j) { j["mlp_bias"] = true; }, {"mlp_bias"}},
      {"interleaved", [](auto& j) { j["rope_interleaved"] = true; }, {"rope_interleaved"}},
      {"quantized",
       [](auto& j) {
         j["quantization_config"] = {{"bits", 4}};
       },
       {"quantization"}},
      {"rope type",
       [](auto& j) {
         j["rope_scaling"] = {{"rope_type", "longrope"}, {"factor", 2}};
       },
       {"longrope", "yarn"}},
      {"rope factor",
       [](auto& j) {
         j["rope_scaling"] = {{"type", "linear"}};
       },
       {"factor"}},
      {"rope shape", [](auto& j) { j["rope_scaling"] = "linear"; }, {"rope_scaling", "object"}},
      {"yarn length",
       [](auto& j) {
         j["rope_scaling"] = {{"type", "yarn"}, {"factor", 4}};
       },
       {"original_max_position_embeddings"}},
      {"llama3 length",
       Llama3("original_max_position_embeddings", nullptr),
       {"original_max_position_embeddings"}},
      {"llama3 low", Llama3("low_freq_factor", "1"), {"low_freq_factor"}},
      {"llama3 high", Llama3("high_freq_factor", nullptr), {"high_freq_factor"}},
      {"llama3 order", Llama3("high_freq_factor", 1.0), {"high_freq_factor", "below"}},
      {"yarn mscale",
       [](auto& j) {
         j["rope_scaling"] = {{"type", "yarn"},
                              {"factor", 4},
                              {"mscale", 1.0},
                              {"original_max_position_embeddings", 1024}};
       },
       {"mscale"}},
      {"theta", [](auto& j) { j.erase("rope_theta"); }, {"rope_theta", "missing"}},
      {"negative theta", [](auto& j) { j["rope_theta"] = -1.0; }, {"rope_theta"}},
      {"layers", [](auto& j) { j["num_hidden_layers"] = 0; }, {"num_hidden_layers", "0"}},
      {"huge", [](auto& j) { j["hidden_size"] = 1e18; }, {"hidden_size"}},
      {"too large", [](auto& j) { j["vocab_size"] = 18446744073709551615u; }, {"vocab_size"}},
      {"text", [](auto& j) { j["num_attention_heads"] = "4"; }, {"num_attention_heads"}},
      {"heads", [](auto& j) { j["num_key_value_heads"] = 3; }, {"num_key_value_heads", "3"}},
      {"odd head", [](auto& j) { j["head_dim"] = 127; }, {"head_dim", "127"}},
      {"eps", [](auto& j) { j["rms_norm_eps"] = 0; }, {"rms_norm_eps"}},
      {"eos",
       [](auto& j) {
         j["eos_token_id"] = {1, 4096};
       },
       {"eos_token_id", "4096"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const auto config = LoadChanged(c.change);
    ASSERT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << config.status();
    for (const char* part : c.in_message) {
      EXPECT_THAT(std::string(config.status().message()), HasSubstr(part));
    }
  }
}

TEST(ConfigTest, ReadsBothSpellingsOfRopeScaling) {
  const nlohmann::json yarn = {
      {"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 2048}};
  const auto older = LoadChanged([&](nlohmann::json& j) { j["rope_scaling"] = yarn; });
  ASSERT_TRUE(older.ok()) << older.status();
  EXPECT_EQ(older->rope.kind, RopeConfig::Kind::kYarn);
  EXPECT_EQ(older->rope.factor, 4.0);
  EXPECT_EQ(older->max_positions, 8192);
  EXPECT_NEAR(older->rope.attention_factor, 1.138629436, 1e-9);

  const auto newer = LoadChanged([&](nlohmann::json& j) {
    j.erase("rope_theta");
    j["rope_parameters"] = yarn;
    j["rope_parameters"]["rope_theta"] = 5e5;
  });
  ASSERT_TRUE(newer.ok()) << newer.status();
  EXPECT_EQ(newer->rope.theta, 5e5);
  EXPECT_EQ(newer->rope.kind, RopeConfig::Kind::kYarn);

  EXPECT_TRUE(LoadChanged([](nlohmann::json& j) { j["rope_scaling"] = nullptr; }).ok());
}

TEST(ConfigTest, AddsTheGenerationConfigsEndIds) {
  ModelFolder folder;
  folder.CopyTiny("config.json");
  folder.Write("generation_config.json", nlohmann::json{{"eos_token_id", {7, 0, 3}}});
  const auto config = LoadModelConfig(folder.path());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->eos_ids, ElementsAre(0, 3, 7));
}

TEST(ConfigTest, HeadDimFollowsFromTheHiddenSizeWhenItIsNotThere) {
  const auto config = LoadChanged([](nlohmann::json& j) { j.erase("head_dim"); });
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->head_dim, 64);
}

TEST(ConfigTest, FamiliesDifferInNormsAndBiases) {
  struct Case {
    const char* architecture;
    bool attention_bias, qk_norm, qkv_bias, o_bias;
  };
  for (const Case& c : {Case{"LlamaForCausalLM", false, false, false, false},
                        Case{"LlamaForCausalLM", true, false, true, true},
                        Case{"Qwen2ForCausalLM", false, false, true, false},
                        Case{"Qwen3ForCausalLM", true, true, true, true}}) {
    SCOPED_TRACE(c.architecture);
    const auto config = LoadChanged([&](nlohmann::json& j) {
      j["architectures"] = {c.architecture};
      j["attention_bias"] = c.attention_bias;
    });
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->qk_norm, c.qk_norm);
    EXPECT_EQ(config->qkv_bias, c.qkv_bias);
    EXPECT_EQ(config->o_bias, c.o_bias);
  }
}

TEST(ConfigTest, OldLlamaFilesLeaveOutDefaults) {
  const auto config = LoadChanged([](nlohmann::json& j) {
    j["architectures"] = {"LlamaForCausalLM"};
    for (const char* key : {"rope_theta", "num_key_value_heads"}) j.erase(key);
    j["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
    j["layer_types"] = {"full_attention"};
  });
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->kv_heads, 4);
  EXPECT_EQ(config->rope.theta, 10000.0);
  EXPECT_EQ(config->rope.kind, RopeConfig::Kind::kLinear);
}

TEST(ConfigTest, DeepNestingIsAnError) {
  const std::string deep = std::string(1000000, '[') + std::string(1000000, ']');
  ModelFolder folder;
  for (const std::string key : {"architectures", "hidden_act", "eos_token_id"}) {
    folder.Write("config.json", "{\"" + key + "\": " + deep + "}");
    const absl::Status status = LoadModelConfig(folder.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_LT(status.message().size(), 1000u);
  }
}

TEST(ConfigTest, DamagedAndMissingFiles) {
  ModelFolder folder;
  EXPECT_EQ(LoadModelConfig(folder.path()).status().code(), absl::StatusCode::kNotFound);
  for (const std::string text : {"", "{", "[]", "3", "\xff\xfe", "{\"architectures\": }"}) {
    folder.Write("config.json", text);
    const auto config = LoadModelConfig(folder.path());
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr("config.json"));
  }
}

}  // namespace
}  // namespace crumb::models
