// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares small models of every family with the published implementations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
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

// Returns the values that fixtures/make_family_fixtures.py gives a tensor: a hash of its name and
// the index, spread evenly around a mean.
RawTensor WeightOf(const std::string& name, const std::vector<int64_t>& shape) {
  uint32_t seed = 2166136261u;
  for (const char byte : name) seed = (seed ^ static_cast<uint8_t>(byte)) * 16777619u;
  const bool norm = name.find("norm") != std::string::npos;
  double spread = norm ? 0.3 : 1.0;
  if (shape.size() == 2) spread = std::sqrt(3.0 / static_cast<double>(shape[1]));
  if (name.find("embed") != std::string::npos) spread = 1.5;
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  std::vector<float> values(static_cast<size_t>(elements));
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    x = x ^ (x >> 16);
    values[i] = static_cast<float>((norm ? 1.0 : 0.0) + spread * (x / 2147483648.0 - 1.0));
  }
  return {"F32", shape,
          std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size())};
}

// Returns the tensors of a model with this config.json.
RawTensors TensorsOf(const nlohmann::json& config) {
  RawTensors tensors;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    tensors[name] = WeightOf(name, shape);
  };
  const int64_t hidden = config["hidden_size"], inner = config["intermediate_size"],
                vocab = config["vocab_size"], heads = config["num_attention_heads"],
                kv_heads = config.value("num_key_value_heads", heads),
                head_dim = config.value("head_dim", hidden / heads);
  const std::string architecture = config["architectures"][0];
  const bool bias = config.value("attention_bias", false),
             qwen2 = architecture.starts_with("Qwen2");
  add("model.embed_tokens.weight", {vocab, hidden});
  add("model.norm.weight", {hidden});
  if (!config["tie_word_embeddings"].get<bool>()) add("lm_head.weight", {vocab, hidden});
  for (int i = 0; i < config["num_hidden_layers"].get<int>(); ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    const auto project = [&](const std::string& name, int64_t rows, int64_t columns, bool biased) {
      add(layer + name + ".weight", {rows, columns});
      if (biased) add(layer + name + ".bias", {rows});
    };
    project("self_attn.q_proj", heads * head_dim, hidden, bias || qwen2);
    project("self_attn.k_proj", kv_heads * head_dim, hidden, bias || qwen2);
    project("self_attn.v_proj", kv_heads * head_dim, hidden, bias || qwen2);
    project("self_attn.o_proj", hidden, heads * head_dim, bias);
    project("mlp.gate_proj", inner, hidden, false);
    project("mlp.up_proj", inner, hidden, false);
    project("mlp.down_proj", hidden, inner, false);
    add(layer + "input_layernorm.weight", {hidden});
    add(layer + "post_attention_layernorm.weight", {hidden});
    if (architecture.starts_with("Qwen3")) {
      add(layer + "self_attn.q_norm.weight", {head_dim});
      add(layer + "self_attn.k_norm.weight", {head_dim});
    }
  }
  return tensors;
}

class FamiliesTest : public testing::Test {
 protected:
  // Runs the fixture's tokens through the model; its rows at the fixture's positions.
  std::vector<float> Logits(const nlohmann::json& config, const RawTensors& tensors) const {
    const ModelFolder folder;
    folder.Write("config.json", config);
    folder.Write("model.safetensors", FormatSafetensors(tensors));
    const auto engine = Engine::Load(folder.path(), {.threads = 2, .chunk_tokens = 40});
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (!engine.ok()) return {};
    DenseKvCache cache((*engine)->config(), (*engine)->pool());
    const std::vector<int32_t> tokens = fixture_["tokens"];
    const auto logits = (*engine)->Forward(cache, tokens, LogitRows::kAll);
    EXPECT_TRUE(logits.ok()) << logits.status();
    std::vector<float> rows;
    for (const int position : fixture_["positions"]) {
      const std::span<const float> row = logits->row(position);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  }

  static std::vector<double> Expected(const nlohmann::json& family) {
    std::vector<double> rows;
    for (const std::vector<double> row : family["logits"]) {
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  }

  const nlohmann::json fixture_ = ReadJson("tests/models/fixtures/families.json");
};

TEST_F(FamiliesTest, LogitsAreThePublishedImplementations) {
  ASSERT_GE(fixture_["families"].size(), 8u);
  for (const auto& [name, family] : fixture_["families"].items()) {
    SCOPED_TRACE(name);
    const nlohmann::json& config = family["config"];
    const std::vector<double> expected = Expected(family);
    const std::vector<float> got = Logits(config, TensorsOf(config));
    ASSERT_EQ(got.size(), expected.size());
    EXPECT_LT(RelativeDifference(got, expected), kTolerance);
  }
}

// Shows that the test above would detect a detail that the engine ignored.
TEST_F(FamiliesTest, EachDetailOfAFamilyMatters) {
  struct Case {
    const char* family;
    std::function<void(nlohmann::json& config, RawTensors& tensors)> change;
  };
  const auto without_bias = [](const std::string& projection) {
    return [projection](nlohmann::json&, RawTensors& tensors) {
      std::string& bytes = tensors.at("model.layers.1.self_attn." + projection + ".bias").bytes;
      bytes.assign(bytes.size(), '\0');
    };
  };
  const auto change = [](const std::string& key, const nlohmann::json& value) {
    return [=](nlohmann::json& config, RawTensors&) { config[key] = value; };
  };
  const Case cases[] = {
      {"llama", change("rope_theta", 6000.0)},
      {"llama", change("tie_word_embeddings", true)},
      {"llama-defaults", change("rope_theta", 12000.0)},
      {"llama-defaults", without_bias("o_proj")},
      {"llama-linear", change("rope_scaling", nullptr)},
      {"llama3", change("rope_scaling", nullptr)},
      {"llama3", [](auto& c, auto&) { c["rope_scaling"]["high_freq_factor"] = 8.0; }},
      {"llama3", [](auto& c, auto&) { c["rope_scaling"]["rope_type"] = "linear"; }},
      {"qwen2", without_bias("q_proj")},
      {"qwen2", without_bias("k_proj")},
      {"qwen2", without_bias("v_proj")},
      {"qwen2-yarn", change("rope_scaling", nullptr)},
      {"qwen3", change("architectures", {"LlamaForCausalLM"})},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.family);
    const nlohmann::json& family = fixture_["families"][c.family];
    nlohmann::json config = family["config"];
    RawTensors tensors = TensorsOf(config);
    c.change(config, tensors);
    const std::vector<float> got = Logits(config, tensors);
    ASSERT_FALSE(got.empty());
    EXPECT_GT(RelativeDifference(got, Expected(family)), 5 * kTolerance);
  }
}

TEST_F(FamiliesTest, NamesTheBiasThatAFileLacks) {
  const nlohmann::json& config = fixture_["families"]["qwen2"]["config"];
  RawTensors tensors = TensorsOf(config);
  const std::string name = "model.layers.0.self_attn.k_proj.bias";
  ASSERT_EQ(tensors.erase(name), 1u);
  const ModelFolder folder;
  folder.Write("config.json", config);
  folder.Write("model.safetensors", FormatSafetensors(tensors));
  const absl::Status status = Engine::Load(folder.path(), {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr(name));
}

}  // namespace
}  // namespace crumb::models
