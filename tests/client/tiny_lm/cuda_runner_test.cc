// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The small model on a GPU against the same on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "client/examples/tiny_lm/runner.h"
#include "crumb/cuda_device.h"
#include "models/cuda/engine.h"
#include "models/sampler.h"
#include "models/tokenizer.h"
#include "tests/client/memory_client.h"
#include "tests/models/model_folder.h"

namespace crumb::tiny_lm {
namespace {

constexpr Duration kPatience = std::chrono::seconds(60);
constexpr int kAnswerTokens = 8;

struct Key {
  const char* name;
  const char* digits;
};
constexpr Key kKeys[] = {{"harbour", "48213"}, {"lantern", "70594"}, {"meadow", "16387"}};

// A document that tells the keys, and a question about one of them.
std::string Prompt(const Key& asked) {
  std::string text = models::ReadText("docs/config.md").substr(0, 6500);
  for (size_t i = 0; i < std::size(kKeys); ++i) {
    const size_t at = text.find('\n', text.size() * (i + 1) / 5);
    text.insert(
        at, std::string("\n# The pass key for ") + kKeys[i].name + " is " + kKeys[i].digits + ".");
  }
  return text + "\n# What is the pass key for " + asked.name + "? It is";
}

class CudaRunnerTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto device = client::OpenCudaDevice(0); absl::IsUnavailable(device.status())) {
      GTEST_SKIP() << device.status();
    }
    tokenizer_ = models::Tokenizer::Load(models::kTinyLm).value();
    engine_ = models::Engine::Load(models::kTinyLm, {}).value();
    const models::ModelConfig& config = engine_->config();
    options_.model = "tiny-lm";
    options_.weights = "test";
    options_.layers = config.layers;
    options_.kv_heads = config.kv_heads;
    options_.q_heads = config.q_heads;
    options_.head_dim = config.head_dim;
    options_.rotations = client::RotationSet::Hadamard(config.head_dim).value();
    options_.verify_every = 1;
  }

  std::unique_ptr<Runner> OnCpu(client::Client* client) {
    return OpenCpuRunner(*engine_, options_, client).value();
  }
  std::unique_ptr<Runner> OnGpu(client::Client* client) {
    auto runner = OpenCudaRunner(models::kTinyLm, options_, client);
    EXPECT_TRUE(runner.ok()) << runner.status();
    return std::move(runner).value();
  }

  // What follows the prompt, token by token, and how many of its tokens came from the cache.
  std::string Answer(Runner& runner, const std::vector<int32_t>& prompt, int* cached) {
    const auto sequence = runner.Begin(prompt, {}).value();
    *cached = sequence->cached_tokens();
    std::vector<int32_t> generated;
    auto fresh = std::span(prompt).subspan(*cached);
    for (int i = 0; i < kAnswerTokens; ++i) {
      const auto logits = sequence->Forward(fresh, models::LogitRows::kLast);
      EXPECT_TRUE(logits.ok()) << logits.status();
      if (!logits.ok()) return "";
      generated.push_back(models::GreedyToken(logits->last()));
      fresh = std::span(generated).last(1);
    }
    EXPECT_TRUE(sequence->Finish().ok());
    EXPECT_TRUE(runner.WaitPublished(kPatience).ok());
    return tokenizer_->Decode(generated);
  }

  std::unique_ptr<models::Tokenizer> tokenizer_;
  std::unique_ptr<models::Engine> engine_;
  client::WorkerOptions options_;
};

TEST_F(CudaRunnerTest, LogitsAreTheCpusWithinBf16) {
  const std::vector<int32_t> prompt = tokenizer_->Encode(Prompt(kKeys[0]));
  ASSERT_GT(prompt.size(), 1024u);  // several chunks
  const auto cpu = OnCpu(nullptr), gpu = OnGpu(nullptr);
  const auto expected_sequence = cpu->Begin(prompt, {}).value();
  const auto sequence = gpu->Begin(prompt, {}).value();
  const models::Logits expected =
      expected_sequence->Forward(prompt, models::LogitRows::kAll).value();
  const auto logits = sequence->Forward(prompt, models::LogitRows::kAll);
  ASSERT_TRUE(logits.ok()) << logits.status();
  ASSERT_EQ(logits->values.size(), expected.values.size());
  ASSERT_EQ(logits->rows, expected.rows);
  double error = 0, norm = 0;
  int other = 0;
  for (int row = 0; row < expected.rows; ++row) {
    double row_error = 0;
    for (size_t i = 0; i < expected.row(row).size(); ++i) {
      const double difference = logits->row(row)[i] - expected.row(row)[i];
      row_error = std::max(row_error, std::abs(difference));
      error += difference * difference;
      norm += double{expected.row(row)[i]} * expected.row(row)[i];
    }
    const int32_t token = models::GreedyToken(logits->row(row));
    const int32_t best = models::GreedyToken(expected.row(row));
    if (token == best) continue;
    // Another choice is right only where the difference of the logits explains it.
    ++other;
    EXPECT_LE(expected.row(row)[best] - expected.row(row)[token], 2 * row_error) << row;
  }
  const double relative = std::sqrt(error / norm);
  std::printf("relative error %.2e, other choice in %d of %d rows\n", relative, other,
              expected.rows);
  EXPECT_LT(relative, 0.03);
  EXPECT_LT(other, expected.rows / 50);
}

TEST_F(CudaRunnerTest, AnswersAsTheCpuDoesAndFromItsOwnAndTheCpusPages) {
  client::MemoryClient store;
  int cached = 0;
  {
    const auto gpu = OnGpu(&store);
    EXPECT_THAT(Answer(*gpu, tokenizer_->Encode(Prompt(kKeys[0])), &cached),
                testing::HasSubstr(kKeys[0].digits));
    EXPECT_EQ(cached, 0);
  }
  for (const Key& key : kKeys) {
    const std::vector<int32_t> prompt = tokenizer_->Encode(Prompt(key));
    const auto alone = OnCpu(nullptr);
    const std::string expected = Answer(*alone, prompt, &cached);
    EXPECT_EQ(cached, 0);
    EXPECT_THAT(expected, testing::HasSubstr(key.digits));
    const auto gpu = OnGpu(&store);
    EXPECT_EQ(Answer(*gpu, prompt, &cached), expected) << key.name;
    // All but the recent window and what lies behind the last whole page.
    EXPECT_GE(cached, static_cast<int>(prompt.size()) - 256 - 2 * 64) << key.name;
    EXPECT_EQ(gpu->counters().verify_failures, 0u);
    const auto reader = OnCpu(&store);  // of pages that the GPU made
    EXPECT_EQ(Answer(*reader, prompt, &cached), expected) << key.name;
    EXPECT_GT(cached, 0);
    EXPECT_EQ(reader->counters().verify_failures, 0u);
  }
}

TEST_F(CudaRunnerTest, DamagedPagesAreDataLoss) {
  client::MemoryClient store;
  int cached = 0;
  const std::vector<int32_t> prompt = tokenizer_->Encode(Prompt(kKeys[0]));
  {
    const auto cpu = OnCpu(&store);
    Answer(*cpu, prompt, &cached);
  }
  for (const auto& [key, bytes] : store.contents()) ASSERT_TRUE(store.Damage(key));
  const auto gpu = OnGpu(&store);
  const auto sequence = gpu->Begin(prompt, {}).value();
  ASSERT_GT(sequence->cached_tokens(), 0);
  const auto logits = sequence->Forward(std::span(prompt).subspan(sequence->cached_tokens()),
                                        models::LogitRows::kLast);
  EXPECT_TRUE(absl::IsDataLoss(logits.status())) << logits.status();
}

TEST_F(CudaRunnerTest, RefusesWrongTokens) {
  const auto gpu = OnGpu(nullptr);
  const std::vector<int32_t> prompt = {1, 2, 3};
  const auto sequence = gpu->Begin(prompt, {}).value();
  EXPECT_TRUE(absl::IsInvalidArgument(
      sequence->Forward(std::vector<int32_t>{}, models::LogitRows::kLast).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      sequence->Forward(std::vector<int32_t>{4096}, models::LogitRows::kLast).status()));
}

// Before it looks for a device.
TEST(CudaEngineTest, RefusesModelsThatItDoesNotServe) {
  for (const auto& [field, value] : {std::pair<std::string, nlohmann::json>("head_dim", 64),
                                     {"attention_bias", true},
                                     {"vocab_size", 4095}}) {
    const models::ModelFolder folder;
    nlohmann::json config = models::ReadJson(std::string(models::kTinyLm) + "/config.json");
    config[field] = value;
    folder.Write("config.json", config);
    const absl::Status status = models::cuda::Engine::Load(folder.path(), {}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("CUDA engine")) << field;
  }
}

}  // namespace
}  // namespace crumb::tiny_lm
