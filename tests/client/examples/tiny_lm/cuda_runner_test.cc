// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares the small model on a GPU with the same model on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "client/examples/tiny_lm/runner.h"
#include "crumb/device_worker.h"
#include "models/cuda/engine.h"
#include "models/logits.h"
#include "models/tokenizer.h"
#include "tests/client/memory_client.h"
#include "tests/models/model_folder.h"

namespace crumb::tiny_lm {
namespace {

constexpr Duration kPatience = std::chrono::seconds(60);
constexpr int kGeneratedTokens = 8;

struct Key {
  const char* name;
  const char* digits;
};
constexpr Key kKeys[] = {{"harbour", "48213"}, {"lantern", "70594"}, {"meadow", "16387"}};

// A document that contains the keys, and a prompt for one of them.
std::string Prompt(const Key& wanted) {
  std::string text = models::ReadText("docs/config.md").substr(0, 6500);
  for (size_t i = 0; i < std::size(kKeys); ++i) {
    const size_t at = text.find('\n', text.size() * (i + 1) / 5);
    text.insert(
        at, std::string("\n# The pass key for ") + kKeys[i].name + " is " + kKeys[i].digits + ".");
  }
  return text + "\n# What is the pass key for " + wanted.name + "? It is";
}

// The differences between a row of the GPU's logits and the CPU's.
struct RowComparison {
  double error = 0, norm = 0;  // sums of squares
  bool same = false;           // the same token has the largest logit
  // Difference between the CPU's and the GPU's choice in the CPU's row, in root mean squares of the
  // row.
  double margin = 0;
};

RowComparison Compare(std::span<const float> got, std::span<const float> expected) {
  RowComparison row;
  for (size_t i = 0; i < expected.size(); ++i) {
    row.error += std::pow(double{got[i]} - expected[i], 2);
    row.norm += std::pow(double{expected[i]}, 2);
  }
  const int32_t token = models::GreedyToken(got), best = models::GreedyToken(expected);
  row.same = token == best;
  row.margin = (expected[best] - expected[token]) /
               std::sqrt(row.norm / static_cast<double>(expected.size()));
  return row;
}

// A tie of two tokens: bf16 rounding may choose either. A wrong token is several root mean squares
// below the best.
constexpr double kTie = 0.15;

class CudaRunnerTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto device = client::OpenCudaDevice(0); absl::IsUnavailable(device.status())) {
      GTEST_SKIP() << "needs a CUDA device: " << device.status();
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

  // Both read the prompt and then the tokens that the CPU chooses. At each one the GPU chooses the
  // same, except for ties. Both begin with the same number of cached tokens, at least `cached`.
  void ExpectSameTokens(Runner& cpu, Runner& gpu, const Key& key, int cached) {
    SCOPED_TRACE(key.name);
    const std::vector<int32_t> prompt = tokenizer_->Encode(Prompt(key));
    const auto expected = cpu.Begin(prompt, {}).value();
    const auto sequence = gpu.Begin(prompt, {}).value();
    EXPECT_EQ(sequence->cached_tokens(), expected->cached_tokens());
    EXPECT_GE(sequence->cached_tokens(), cached);
    std::vector<int32_t> generated;
    auto fresh = std::span(prompt).subspan(expected->cached_tokens());
    for (int i = 0; i < kGeneratedTokens; ++i) {
      const auto best = expected->Forward(fresh, models::LogitRows::kLast);
      const auto logits = sequence->Forward(fresh, models::LogitRows::kLast);
      ASSERT_TRUE(best.ok()) << best.status();
      ASSERT_TRUE(logits.ok()) << logits.status();
      EXPECT_LE(Compare(logits->last(), best->last()).margin, kTie) << "token " << i;
      generated.push_back(models::GreedyToken(best->last()));
      fresh = std::span(generated).last(1);
    }
    EXPECT_THAT(tokenizer_->Decode(generated), testing::HasSubstr(key.digits));
    ASSERT_TRUE(expected->Finish().ok());
    ASSERT_TRUE(sequence->Finish().ok());
    EXPECT_TRUE(cpu.WaitPublished(kPatience).ok());
    EXPECT_TRUE(gpu.WaitPublished(kPatience).ok());
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
  double error = 0, norm = 0, margin = 0;
  int other = 0;
  for (int i = 0; i < expected.rows; ++i) {
    const RowComparison row = Compare(logits->row(i), expected.row(i));
    error += row.error;
    norm += row.norm;
    other += row.same ? 0 : 1;
    margin = std::max(margin, row.margin);
  }
  const double relative = std::sqrt(error / norm);
  std::printf("relative error %.2e, other choice in %d of %d rows, margin at most %.3f\n", relative,
              other, expected.rows, margin);
  EXPECT_LT(relative, 0.02);
  EXPECT_LE(margin, kTie);
  EXPECT_LT(other, expected.rows / 50);
}

TEST_F(CudaRunnerTest, GeneratesTheCpusTokensFromItsOwnAndTheCpusPages) {
  client::MemoryClient store;
  ExpectSameTokens(*OnCpu(nullptr), *OnGpu(&store), kKeys[0], 0);
  for (const Key& key : kKeys) {
    // Pages published by the GPU are attended by other workers on both back ends.
    const auto cpu = OnCpu(&store), gpu = OnGpu(&store);
    const int prompt = static_cast<int>(tokenizer_->Encode(Prompt(key)).size());
    ExpectSameTokens(*cpu, *gpu, key, prompt - 256 - 2 * 64);
    EXPECT_EQ(cpu->counters().verify_failures, 0u);
    EXPECT_EQ(gpu->counters().verify_failures, 0u);
  }
  client::MemoryClient cpus;
  {
    const auto writer = OnCpu(&cpus);
    const std::vector<int32_t> prompt = tokenizer_->Encode(Prompt(kKeys[0]));
    const auto sequence = writer->Begin(prompt, {}).value();
    ASSERT_TRUE(sequence->Forward(prompt, models::LogitRows::kLast).ok());
    ASSERT_TRUE(sequence->Finish().ok());
    ASSERT_TRUE(writer->WaitPublished(kPatience).ok());
  }
  ExpectSameTokens(*OnCpu(&cpus), *OnGpu(&cpus), kKeys[1], 1024);
}

TEST_F(CudaRunnerTest, DamagedPagesAreDataLoss) {
  options_.verify_every = 0;  // the host verifies none; the device verifies all that it copies
  client::MemoryClient store;
  const std::vector<int32_t> prompt = tokenizer_->Encode(Prompt(kKeys[0]));
  {
    const auto cpu = OnCpu(&store);
    const auto sequence = cpu->Begin(prompt, {}).value();
    ASSERT_TRUE(sequence->Forward(prompt, models::LogitRows::kLast).ok());
    ASSERT_TRUE(sequence->Finish().ok());
    ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
  }
  for (const auto& [key, bytes] : store.contents()) {
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes)));
    if (header.ok() && header->position == 6) {
      ASSERT_TRUE(store.Damage(key));
    }
  }
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

// The check comes before the search for a device.
TEST(CudaEngineTest, RefusesModelsThatItDoesNotServe) {
  for (const auto& [field, value] : {std::pair<std::string, nlohmann::json>("head_dim", 64),
                                     {"attention_bias", true},
                                     {"architectures", {"LlamaForCausalLM"}},
                                     {"architectures", {"Qwen2ForCausalLM"}},
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
