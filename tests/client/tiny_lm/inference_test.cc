// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/examples/tiny_lm/inference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST(RunOptionsTest, RunsOnTheCpuUnlessToldOtherwise) {
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
            "crumb-tiny-lm: --prompt-file is required (see crumb-tiny-lm --help)\n");
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

TEST(InferenceTest, AnswersOnTheCpu) {
  const auto inference = Inference::Open(Options("cpu"));
  ASSERT_TRUE(inference.ok()) << inference.status();
  const std::vector<int32_t> prompt = (*inference)->Encode("# The pass key");
  const auto report = (*inference)->Run(prompt);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT(report->generated_tokens, 0);
  EXPECT_EQ(report->stats.prompt_tokens, static_cast<int>(prompt.size()));
  EXPECT_EQ(report->store_state, "off");
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
