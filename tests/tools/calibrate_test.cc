// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "common/rotation_file.h"
#include "tests/tools/temp_folder.h"
#include "tools/rotation_view.h"

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

  const TempFolder folder_;
};

TEST_F(CalibrateTest, RunsTheModelAndWritesAFileThatVerifies) {
  for (const char* method : {"crumb", "oscar", "hadamard"}) {
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
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
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
