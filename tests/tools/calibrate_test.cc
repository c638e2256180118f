// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "common/rotation_file.h"
#include "tests/common/temporary_folder.h"

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

class CalibrateTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }

  CalibrateCommand Command(const std::string& method) const {
    CalibrateCommand command;
    command.method = method;
    command.model = "models/data/tiny-lm";
    command.texts = {"LICENSE"};
    command.out = Path(method);
    command.context = 512;
    command.tokens = 1536;
    command.threads = 1;
    return command;
  }

  const TemporaryFolder folder_;
};

TEST_F(CalibrateTest, RunsTheModelAndWritesAFileThatVerifies) {
  for (const char* method : {"crumb", "oscar", "hadamard", "naive"}) {
    const CommandResult made = RunCalibrate(Command(method), nullptr);
    ASSERT_TRUE(made.status.ok()) << made.status;
    const CommandResult verified = RunRotationVerify({Path(method)});
    EXPECT_TRUE(verified.status.ok()) << verified.status << verified.text;
    const CommandResult shown = RunRotationShow({Path(method)});
    EXPECT_EQ(shown.json["method"], method);
    EXPECT_EQ(shown.json["digest"], made.json["digest"]);
  }
  const CommandResult crumb = RunRotationShow({Path("crumb")});
  EXPECT_EQ(crumb.json["positions"], 4096);
  EXPECT_EQ(crumb.json["tokens"], 3 * (512 - 64));
  ASSERT_EQ(crumb.json["spectrum"].size(), 4u);
  for (const auto& layer : crumb.json["spectrum"]) {
    EXPECT_LT(layer["feedback_gain"], 0.95);
    EXPECT_GT(layer["mass_shift"], 0.0);
  }
}

TEST_F(CalibrateTest, TheFileSaysWhatAttentionErrorToExpect) {
  CalibrateCommand command = Command("crumb");
  command.context = 1024;
  command.tokens = 3072;  // 11 windows in each sequence
  const CommandResult made = RunCalibrate(command, nullptr);
  ASSERT_TRUE(made.status.ok()) << made.status;
  EXPECT_FALSE(made.json.contains("warnings"));
  EXPECT_THAT(made.text, testing::Not(HasSubstr("warning")));
  const CommandResult shown = RunRotationShow({Path("crumb")});
  const double mean = shown.json["attention_error"];
  EXPECT_GT(mean, 0.1);
  EXPECT_LT(mean, 0.5);
  EXPECT_THAT(shown.text, HasSubstr("expected attention error 0."));
  double sum = 0.0;
  for (const auto& layer : shown.json["spectrum"]) sum += double{layer["attention_error"]};
  EXPECT_NEAR(sum / 4, mean, 1e-6);
}

// In a sequence of 383 tokens no query attends quantized history, so that neither mass shift nor
// attention error can be measured.
TEST_F(CalibrateTest, SequencesTooShortToMeasureOnAreSaid) {
  CalibrateCommand command = Command("crumb");
  for (const auto& [context, windows] : {std::pair{383, 0}, std::pair{384, 8}}) {
    command.context = context;
    command.tokens = 8 * context;
    const CommandResult made = RunCalibrate(command, nullptr);
    ASSERT_TRUE(made.status.ok()) << made.status;
    EXPECT_THAT(made.text, HasSubstr("warning: only " + std::to_string(windows) +
                                     " windows to measure on, 32 are needed"));
    EXPECT_THAT(made.text, HasSubstr("at least 384 tokens"));
    ASSERT_EQ(made.json["warnings"].size(), 1u);
    EXPECT_EQ(made.text.find("mass shift could not be measured") != std::string::npos,
              windows == 0);
    const auto file = ReadRotationFile(Path("crumb"));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_TRUE(file->attention_error.empty());
    for (const float shift : file->shift) EXPECT_EQ(shift == 0.0f, windows == 0);
  }
  command.method = "oscar";
  command.context = 300;
  EXPECT_THAT(RunCalibrate(command, nullptr).text, HasSubstr("warning: only 0 windows"));
}

TEST_F(CalibrateTest, TheSameTextGivesTheSameFile) {
  EXPECT_EQ(RunCalibrate(Command("oscar"), nullptr).json["digest"],
            RunCalibrate(Command("oscar"), nullptr).json["digest"]);
}

TEST_F(CalibrateTest, BadInputIsNamedAndNothingIsWritten) {
  CalibrateCommand command = Command("crumb");
  command.tokens = 512;  // 448 behind the sink, 512 are needed
  EXPECT_THAT(std::string(RunCalibrate(command, nullptr).status.message()),
              HasSubstr("layer 0: only 448"));
  command.context = 5000;
  EXPECT_THAT(std::string(RunCalibrate(command, nullptr).status.message()),
              HasSubstr("4096 positions"));
  command.context = 1600;  // more than are to be read
  command.tokens = 1536;
  EXPECT_THAT(std::string(RunCalibrate(command, nullptr).status.message()),
              HasSubstr("1536 are to be read, less than one sequence of 1600"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

// The error is found before the work, so that no progress is reported.
TEST_F(CalibrateTest, APlaceThatCannotBeWrittenShowsAtOnce) {
  CalibrateCommand command = Command("crumb");
  for (const std::string& out : {Path("no/such/folder/rotation"), folder_.path()}) {
    command.out = out;
    bool worked = false;
    const CommandResult result = RunCalibrate(command, [&](double) { worked = true; });
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("writing " + out));
    EXPECT_FALSE(worked);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(CalibrateTest, FilesThatAreShorterThanASequenceCountTogether) {
  std::ifstream in("LICENSE");
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  CalibrateCommand command = Command("oscar");
  command.texts.clear();
  for (size_t at = 0; at < text.size(); at += 1000) {  // some 300 tokens
    const std::string name = Path("part" + std::to_string(at));
    std::ofstream(name) << text.substr(at, 1000);
    command.texts.push_back(name);
  }
  const CommandResult made = RunCalibrate(command, nullptr);
  ASSERT_TRUE(made.status.ok()) << made.status;
  EXPECT_EQ(made.json["tokens"], 1536);
}

// Both of two texts are read if --tokens has room for one of them only.
TEST_F(CalibrateTest, AllTextsAreReadWhereThereIsTooMuch) {
  CalibrateCommand command = Command("oscar");
  const auto digest = [&](const std::vector<std::string>& texts) {
    command.texts = texts;
    const CommandResult made = RunCalibrate(command, nullptr);
    EXPECT_TRUE(made.status.ok()) << made.status;
    return made.json["digest"];
  };
  EXPECT_NE(digest({"LICENSE", "docs/quality.md"}), digest({"LICENSE", "docs/tools.md"}));
}

TEST_F(CalibrateTest, VerifyFindsARotationThatIsNone) {
  ASSERT_TRUE(RunCalibrate(Command("hadamard"), nullptr).status.ok());
  auto file = ReadRotationFile(Path("hadamard"));
  ASSERT_TRUE(file.ok());
  file->rotation_v[77] *= 1.01f;
  ASSERT_TRUE(WriteRotationFile(*file, Path("bent")).ok());
  EXPECT_EQ(RunRotationVerify({Path("bent")}).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(RunRotationVerify({"LICENSE"}).status.code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace crumb::tools
