// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <thread>

#include "models/kv_cache.h"
#include "models/logits.h"
#include "models/tokenizer.h"
#include "tests/models/model_folder.h"

namespace crumb::models {
namespace {

using ::testing::HasSubstr;

// The published model's logits (fixtures/make_fixtures.py) span some 40 units. Rounding q, k and v
// to bf16 in both leaves the effect of single values that f32 noise rounds to the other side:
// 0.0065 rms and 0.04 at most were measured. Without that rounding in the published model they are
// 0.015 and 0.09; a RoPE base that is wrong by 1 % gives 0.019 and 0.08.
struct Tolerance {
  double rms;
  double largest;
};
constexpr Tolerance kRounded = {0.012, 0.08};
constexpr Tolerance kNotRounded = {0.03, 0.2};
// The noise between two ways to split a prompt into chunks, over all logits; 2e-4 was measured.
constexpr double kChunkKlMax = 1e-3;
constexpr double kChunkKlMean = 2e-5;

std::unique_ptr<Engine> LoadEngine(const std::string& dir, const EngineOptions& options) {
  auto engine = Engine::Load(dir, options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

Logits Forward(const Engine& engine, KvCache& cache, std::span<const int32_t> tokens,
               LogitRows rows) {
  auto logits = engine.Forward(cache, tokens, rows);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return *std::move(logits);
}

// Returns all logits of `tokens` from an empty cache.
Logits RunFresh(const Engine& engine, std::span<const int32_t> tokens) {
  DenseKvCache cache(engine.config(), engine.pool());
  return Forward(engine, cache, tokens, LogitRows::kAll);
}

// Expects equal logits up to the noise of f32 sums in another order.
void ExpectSame(const Logits& a, const Logits& b) {
  ASSERT_EQ(a.values.size(), b.values.size());
  const LogitAgreement agreement = CompareLogits(a, b);
  EXPECT_LT(agreement.max_kl, kChunkKlMax);
  EXPECT_LT(agreement.mean_kl, kChunkKlMean);
  EXPECT_GT(agreement.top1, 0.98);
}

double LogSumExp(std::span<const float> row) {
  double sum = 0.0;
  for (const float value : row) sum += std::exp(double{value});
  return std::log(sum);
}

class EngineTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    fixture_ = new nlohmann::json(ReadJson("tests/models/fixtures/logits.json"));
    engine_ = LoadEngine(kTinyLm, {.threads = 2}).release();
  }
  static void TearDownTestSuite() {
    delete engine_;
    delete fixture_;
  }

  // Returns the first `count` tokens of the fixture's prompt, or all.
  static std::vector<int32_t> Tokens(size_t count = SIZE_MAX) {
    std::vector<int32_t> ids = (*fixture_)["ids"];
    if (count < ids.size()) ids.resize(count);
    return ids;
  }

  // Compares `logits` with those of the fixture; the most likely tokens must be the same.
  static void ExpectFixture(const Logits& logits, const std::string& run,
                            const Tolerance& tolerance) {
    const std::vector<int> positions = (*fixture_)["positions"];
    const int step = (*fixture_)["vocab_step"];
    std::vector<double> differences;
    for (size_t p = 0; p < positions.size(); ++p) {
      if (positions[p] >= logits.rows) continue;
      const nlohmann::json& expected = (*fixture_)["runs"][run]["rows"][p];
      const std::span<const float> row = logits.row(positions[p]);
      const std::vector<double> values = expected["logits"];
      for (size_t i = 0; i < values.size(); ++i) differences.push_back(row[i * step] - values[i]);
      differences.push_back(LogSumExp(row) - expected["log_sum_exp"].get<double>());
      EXPECT_EQ(GreedyToken(row), expected["top"].get<int>()) << "position " << positions[p];
    }
    ASSERT_GT(differences.size(), 500u);
    double squares = 0.0;
    double largest = 0.0;
    for (const double difference : differences) {
      squares += difference * difference;
      largest = std::max(largest, std::abs(difference));
    }
    const double rms = std::sqrt(squares / static_cast<double>(differences.size()));
    RecordProperty(run, "rms " + std::to_string(rms) + " largest " + std::to_string(largest));
    EXPECT_LT(rms, tolerance.rms) << run;
    EXPECT_LT(largest, tolerance.largest) << run;
  }

  static nlohmann::json* fixture_;
  static Engine* engine_;
};

nlohmann::json* EngineTest::fixture_ = nullptr;
Engine* EngineTest::engine_ = nullptr;

TEST_F(EngineTest, LogitsAreThePublishedModels) {
  const Logits logits = RunFresh(*engine_, Tokens());
  ExpectFixture(logits, "rounded", kRounded);
  ExpectFixture(logits, "published", kNotRounded);
}

// The effects of epsilon, RoPE base and YaRN are too small in the model itself, or absent.
TEST_F(EngineTest, FollowsChangesOfTheConfiguration) {
  for (const char* run : {"large_eps", "small_theta", "yarn"}) {
    ModelFolder folder;
    nlohmann::json config = ReadJson(std::string(kTinyLm) + "/config.json");
    config.update((*fixture_)["runs"][run]["changes"]);
    folder.Write("config.json", config);
    folder.CopyTiny("model.safetensors");
    const auto engine = LoadEngine(folder.path(), {.pool = &engine_->pool()});
    ExpectFixture(RunFresh(*engine, Tokens(301)), run, kRounded);
  }
}

TEST_F(EngineTest, ChunksDoNotChangeTheResult) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::vector<int32_t> tokens = Tokens(160);
  const Logits whole = RunFresh(*engine_, tokens);
  for (const size_t largest : {1, 7, 40, 100}) {
    DenseKvCache cache(engine_->config(), engine_->pool());
    Logits chunked = {static_cast<int>(tokens.size()), whole.vocab_size, {}};
    for (size_t begin = 0; begin < tokens.size();) {
      const size_t count = std::min(tokens.size() - begin, 1 + random() % largest);
      const Logits part =
          Forward(*engine_, cache, std::span(tokens).subspan(begin, count), LogitRows::kAll);
      chunked.values.insert(chunked.values.end(), part.values.begin(), part.values.end());
      begin += count;
    }
    EXPECT_EQ(cache.length(), 160);
    ExpectSame(whole, chunked);
  }
}

TEST_F(EngineTest, OwnChunksDoNotChangeTheResult) {
  const std::vector<int32_t> tokens = Tokens(130);
  const Logits whole = RunFresh(*engine_, tokens);
  const auto small = LoadEngine(kTinyLm, {.pool = &engine_->pool(), .chunk_tokens = 33});
  const Logits chunked = RunFresh(*small, tokens);
  ExpectSame(whole, chunked);
  DenseKvCache cache(small->config(), small->pool());
  const Logits last = Forward(*small, cache, tokens, LogitRows::kLast);
  ASSERT_EQ(last.rows, 1);
  EXPECT_LT(KlDivergence(chunked.last(), last.last()), kChunkKlMax);
}

TEST_F(EngineTest, ThreadCountDoesNotChangeAnything) {
  const std::vector<int32_t> tokens = Tokens(100);
  const auto alone = LoadEngine(kTinyLm, {.threads = 1});
  const auto many = LoadEngine(kTinyLm, {.threads = 5});
  EXPECT_EQ(RunFresh(*alone, tokens).values, RunFresh(*many, tokens).values);
}

TEST_F(EngineTest, SequencesOfDifferentThreadsDoNotMix) {
  const std::vector<int32_t> tokens = Tokens(60);
  const std::vector<int32_t> other(tokens.rbegin(), tokens.rend());
  const Logits expected = RunFresh(*engine_, tokens);
  const Logits expected_other = RunFresh(*engine_, other);
  Logits got;
  Logits got_other;
  std::thread first([&] { got = RunFresh(*engine_, tokens); });
  std::thread second([&] { got_other = RunFresh(*engine_, other); });
  first.join();
  second.join();
  EXPECT_EQ(got.values, expected.values);
  EXPECT_EQ(got_other.values, expected_other.values);
}

// The prompt has two thousand tokens with the number near the beginning, and is continued greedily.
TEST_F(EngineTest, RecallsPasskeysFromFarBack) {
  const auto tokenizer = Tokenizer::Load(kTinyLm);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text = ReadText("LICENSE");
  std::string prompt = text.substr(0, 1000);
  prompt += "\n# The pass key for Ada is 48213.\n";
  prompt += text.substr(1000, 1500);
  prompt += "\n# The pass key for Bob is 90577.\n";
  prompt += text.substr(2500);
  std::vector<int32_t> document = (*tokenizer)->Encode(prompt);
  ASSERT_GT(document.size(), 1900u);
  document.resize(1900);
  DenseKvCache read(engine_->config(), engine_->pool());
  Forward(*engine_, read, document, LogitRows::kLast);
  const auto recalled = [&](const std::string& name) {
    DenseKvCache cache = read;
    Logits logits = Forward(
        *engine_, cache, (*tokenizer)->Encode("\n# What is the pass key for " + name + "? It is"),
        LogitRows::kLast);
    std::vector<int32_t> generated;
    for (int i = 0; i < 6; ++i) {
      const int32_t next = GreedyToken(logits.last());
      generated.push_back(next);
      logits = Forward(*engine_, cache, std::span(&next, 1), LogitRows::kLast);
    }
    return (*tokenizer)->Decode(generated);
  };
  EXPECT_THAT(recalled("Ada"), HasSubstr("48213"));
  EXPECT_THAT(recalled("Bob"), HasSubstr("90577"));
}

TEST_F(EngineTest, RefusesBadTokensAndTooManyOfThem) {
  DenseKvCache cache(engine_->config(), engine_->pool());
  const auto code = [&](const std::vector<int32_t>& tokens) {
    return engine_->Forward(cache, tokens, LogitRows::kLast).status().code();
  };
  EXPECT_EQ(code({}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({1, 4096}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({-1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(std::vector<int32_t>(4097, 1)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(code({1, 4095}), absl::StatusCode::kOk);
}

// A cache whose calls return an error.
class FailingCache : public KvCache {
 public:
  int length() const override { return 0; }
  absl::Status Append(int, int, const kernels::Bf16*, const kernels::Bf16*) override {
    return absl::DataLossError("rows are gone");
  }
  absl::Status Attend(int, int, const kernels::Bf16*, float*) override { return absl::OkStatus(); }
  absl::Status Advance(std::span<const int32_t>) override { return absl::OkStatus(); }
};

TEST_F(EngineTest, PassesTheCachesErrorsOn) {
  FailingCache cache;
  const auto logits = engine_->Forward(cache, Tokens(3), LogitRows::kLast);
  EXPECT_EQ(logits.status(), absl::DataLossError("rows are gone"));
}

// tiny-lm as f32 in two shards with a separate output matrix yields the same numbers.
TEST_F(EngineTest, ShardsF32AndUntiedOutputChangeNothing) {
  ModelFolder folder;
  nlohmann::json config = ReadJson(std::string(kTinyLm) + "/config.json");
  config["tie_word_embeddings"] = false;
  folder.Write("config.json", config);
  RawTensors shards[2];
  nlohmann::json map;
  for (const auto& [name, tensor] :
       ParseSafetensors(ReadText(std::string(kTinyLm) + "/model.safetensors"))) {
    const int shard = name.find("layers.1.") == std::string::npos ? 0 : 1;
    shards[shard][name] = WidenToF32(tensor);
    map[name] = shard == 0 ? "a.safetensors" : "b.safetensors";
  }
  shards[1]["lm_head.weight"] = shards[0]["model.embed_tokens.weight"];
  map["lm_head.weight"] = "b.safetensors";
  folder.Write("a.safetensors", FormatSafetensors(shards[0]));
  folder.Write("b.safetensors", FormatSafetensors(shards[1]));
  folder.Write("model.safetensors.index.json", nlohmann::json{{"weight_map", map}});
  const auto engine = LoadEngine(folder.path(), {.pool = &engine_->pool()});
  const std::vector<int32_t> tokens = Tokens(50);
  EXPECT_EQ(RunFresh(*engine, tokens).values, RunFresh(*engine_, tokens).values);
}

TEST(EngineLoadTest, NamesWhatADirectoryLacks) {
  ModelFolder folder;
  folder.CopyTiny("config.json");
  RawTensors tensors = ParseSafetensors(ReadText(std::string(kTinyLm) + "/model.safetensors"));
  const RawTensor norm = tensors["model.layers.2.self_attn.k_norm.weight"];

  tensors.erase("model.layers.2.self_attn.k_norm.weight");
  folder.Write("model.safetensors", FormatSafetensors(tensors));
  const absl::Status missing = Engine::Load(folder.path(), {}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("model.layers.2.self_attn.k_norm.weight"));

  tensors["model.layers.2.self_attn.k_norm.weight"] = {"BF16", {64}, norm.bytes.substr(0, 128)};
  folder.Write("model.safetensors", FormatSafetensors(tensors));
  const absl::Status shape = Engine::Load(folder.path(), {}).status();
  EXPECT_EQ(shape.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shape.message()), HasSubstr("model.layers.2.self_attn.k_norm.weight"));
  EXPECT_THAT(std::string(shape.message()), HasSubstr("[128]"));

  const std::string whole = ReadText(std::string(kTinyLm) + "/model.safetensors");
  folder.Write("model.safetensors", whole.substr(0, whole.size() / 2));
  EXPECT_THAT(std::string(Engine::Load(folder.path(), {}).status().message()),
              HasSubstr("truncated"));
}

TEST(EngineLoadTest, AnUntiedModelNeedsItsOutputMatrix) {
  ModelFolder folder;
  nlohmann::json config = ReadJson(std::string(kTinyLm) + "/config.json");
  config["tie_word_embeddings"] = false;
  folder.Write("config.json", config);
  folder.CopyTiny("model.safetensors");
  EXPECT_THAT(std::string(Engine::Load(folder.path(), {}).status().message()),
              HasSubstr("lm_head.weight"));
}

TEST(EngineLoadTest, RefusesAnEmptyChunk) {
  EXPECT_EQ(Engine::Load(kTinyLm, {.chunk_tokens = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace crumb::models
