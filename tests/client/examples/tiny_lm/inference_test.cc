// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/examples/tiny_lm/inference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/examples/tiny_lm/prompt.h"
#include "crumb/device_worker.h"
#include "tests/models/model_folder.h"

namespace crumb::tiny_lm {
namespace {

using ::testing::HasSubstr;

std::optional<int> Parse(std::vector<std::string> words, RunOptions& options) {
  words.insert(words.begin(), "crumb-tiny-lm");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return ParseRunOptions(static_cast<int>(argv.size()), argv.data(), options);
}

TEST(RunOptionsTest, RunsOnTheCpuByDefault) {
  RunOptions options;
  EXPECT_FALSE(Parse({"--prompt-file", "x"}, options).has_value());
  EXPECT_EQ(options.device, "cpu");
  EXPECT_FALSE(Parse({"--prompt-file", "x", "--device", "cuda"}, options).has_value());
  EXPECT_EQ(options.device, "cuda");
  EXPECT_EQ(Parse({"--prompt-file", "x", "--device", "tpu"}, options), 2);
}

TEST(RunOptionsTest, ErrorsNameTheProgram) {
  RunOptions options;
  testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({}, options), 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "crumb-tiny-lm: --prompt-file or --messages is required (see crumb-tiny-lm --help)\n");
}

TEST(RunOptionsTest, APromptIsATextAMessageOrAConversation) {
  RunOptions options;
  EXPECT_FALSE(Parse({"--prompt-file", "x", "--chat", "--system", "s"}, options).has_value());
  EXPECT_TRUE(options.chat);
  options = {};
  EXPECT_FALSE(Parse({"--messages", "x"}, options).has_value());
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"--messages", "x", "--prompt-file", "y"},
        {"--messages", "x", "--chat"},
        {"--chat"},
        {"--prompt-file", "x", "--system", "s"}}) {
    options = {};
    testing::internal::CaptureStderr();
    EXPECT_EQ(Parse(words, options), 2);
    EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("--help"));
  }
}

RunOptions Options(const std::string& device) {
  RunOptions options;
  options.model = models::kTinyLm;
  options.prompt_file = "-";
  options.device = device;
  options.generate = 4;
  options.threads = 1;
  return options;
}

TEST(InferenceTest, GeneratesOnTheCpu) {
  const auto inference = Inference::Open(Options("cpu"));
  ASSERT_TRUE(inference.ok()) << inference.status();
  Prompt prompt = {(*inference)->tokenizer().Encode("# The pass key"), std::nullopt};
  const auto report = (*inference)->Run(prompt);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT(report->generated_tokens, 1);
  EXPECT_EQ(report->stats.prompt_tokens, static_cast<int>(prompt.tokens.size()));
  EXPECT_EQ(report->store_state, "off");

  // An end of turn stops a generation as the model's own end tokens do.
  prompt.end_of_turn = (*inference)->tokenizer().Encode(report->text).front();
  const auto stopped = (*inference)->Run(prompt);
  ASSERT_TRUE(stopped.ok()) << stopped.status();
  EXPECT_EQ(stopped->generated_tokens, 0);
}

class PromptTest : public testing::Test {
 protected:
  PromptTest() {
    folder_.CopyTiny("tokenizer.json");
    folder_.Write("text", std::string("Hello"));
    folder_.Write("talk.json", nlohmann::json::array({{{"role", "user"}, {"content", "Hello"}}}));
    const auto tokenizer = models::Tokenizer::Load(folder_.path());
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    options_.model = folder_.path();
  }

  void AddTemplate() const {
    folder_.Write("tokenizer_config.json",
                  nlohmann::json{{"chat_template",
                                  "<|im_start|>{{ role }}<|im_end|><|im_start|>system\nBe "
                                  "brief.<|im_end|>"}});
  }
  absl::StatusOr<std::string> Text() const {
    const auto tokenizer = models::Tokenizer::Load(folder_.path());
    const auto prompt = ReadPrompt(options_, **tokenizer);
    if (!prompt.ok()) return prompt.status();
    return (*tokenizer)->Decode(prompt->tokens);
  }

  const models::ModelFolder folder_;
  RunOptions options_;
};

TEST_F(PromptTest, ATextIsReadAsItIs) {
  options_.prompt_file = folder_.path() + "/text";
  EXPECT_EQ(*Text(), "Hello");
  options_.prompt_file = folder_.path() + "/absent";
  EXPECT_EQ(Text().status().code(), absl::StatusCode::kNotFound);
}

TEST_F(PromptTest, ATextBeginsWithTheModelsBeginTokens) {
  nlohmann::json json = models::ReadJson(std::string(models::kTinyLm) + "/tokenizer.json");
  const nlohmann::json special = {{"SpecialToken", {{"id", "<|endoftext|>"}}}};
  json["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single", {special, {{"Sequence", {{"id", "A"}}}}}},
                            {"special_tokens", {{"<|endoftext|>", {{"ids", {0}}}}}}};
  folder_.Write("tokenizer.json", json);
  options_.prompt_file = folder_.path() + "/text";
  EXPECT_EQ(*Text(), "<|endoftext|>Hello");
}

TEST_F(PromptTest, MessagesAreWrittenByTheModelsTemplate) {
  const std::string turn = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n";
  options_.prompt_file = folder_.path() + "/text";
  options_.chat = true;
  EXPECT_EQ(Text().status().code(), absl::StatusCode::kNotFound);
  AddTemplate();
  EXPECT_EQ(*Text(), "<|im_start|>system\nBe brief.<|im_end|>\n" + turn);
  options_.system = "Sing.";
  EXPECT_EQ(*Text(), "<|im_start|>system\nSing.<|im_end|>\n" + turn);

  options_ = {};
  options_.model = folder_.path();
  options_.messages = folder_.path() + "/talk.json";
  EXPECT_EQ(*Text(), "<|im_start|>system\nBe brief.<|im_end|>\n" + turn);
  folder_.Write("talk.json", std::string("[]"));
  EXPECT_EQ(Text().status().code(), absl::StatusCode::kInvalidArgument);
  options_.messages = folder_.path() + "/absent";
  EXPECT_EQ(Text().status().code(), absl::StatusCode::kNotFound);
}

// It does not fall back to the CPU silently.
TEST(InferenceTest, SaysWhyThereIsNoCuda) {
  const absl::Status device = client::OpenCudaDevice(0).status();
  if (device.ok()) GTEST_SKIP() << "needs a machine without a GPU";
  const absl::Status status = Inference::Open(Options("cuda")).status();
  EXPECT_EQ(status.code(), device.code());
  EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA"));
}

}  // namespace
}  // namespace crumb::tiny_lm
