// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "calibration/rotation_zoo.h"
#include "common/rotation_file.h"
#include "tests/common/temporary_folder.h"

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

constexpr char kGoldenV1[] = "tests/calibration/fixtures/torch_v1.pt";
constexpr char kGoldenV2[] = "tests/calibration/fixtures/torch_v2.pt";

class RotationConvertTest : public testing::Test {
 protected:
  std::string ErrorOf(const RotationConvertCommand& command) const {
    const CommandResult result = RunRotationConvert(command);
    EXPECT_FALSE(result.status.ok());
    EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
    return std::string(result.status.message());
  }
  RotationConvertCommand Command(std::vector<std::string> files, const std::string& out) const {
    RotationConvertCommand command;
    command.files = std::move(files);
    command.out = folder_.File(out);
    return command;
  }

  const TemporaryFolder folder_;
};

TEST_F(RotationConvertTest, ImportsBothSidesWhateverTheirOrder) {
  RotationConvertCommand command = Command({kGoldenV2, kGoldenV1}, "ours");
  command.model = "some-model";
  command.clip_v = 0.96f;
  const CommandResult made = RunRotationConvert(command);
  ASSERT_TRUE(made.status.ok()) << made.status;
  EXPECT_TRUE(RunRotationVerify({command.out}).status.ok());
  const CommandResult shown = RunRotationShow({command.out});
  EXPECT_EQ(shown.json["model"], "some-model");
  EXPECT_EQ(shown.json["layer_ids"], nlohmann::json({3, 7}));
  EXPECT_FLOAT_EQ(shown.json["clip_v"], 0.96f);
  ASSERT_EQ(shown.json["spectrum"].size(), 2u);
  EXPECT_EQ(shown.json["spectrum"][0]["layer"], 3);
  EXPECT_TRUE(shown.json["spectrum"][0]["top8_share_v"].is_null());
  const double gain = shown.json["spectrum"][1]["feedback_gain"];
  EXPECT_GT(gain, 0.9);  // eigenvalues 7, 8, 9, 10 are nearly equal: little to gain
  EXPECT_LT(gain, 1.0);
}

TEST_F(RotationConvertTest, ExportsOneSide) {
  RotationConvertCommand command = Command({kGoldenV1}, "again.pt");
  command.format = "v1";
  ASSERT_TRUE(RunRotationConvert(command).status.ok());
  const auto before = calibration::ReadRotationZoo(kGoldenV1);
  const auto after = calibration::ReadRotationZoo(command.out);
  ASSERT_TRUE(before.ok() && after.ok()) << after.status();
  EXPECT_EQ(after->rotation, before->rotation);
  EXPECT_EQ(after->eigenvalues, before->eigenvalues);
  EXPECT_EQ(after->layer_ids, before->layer_ids);
}

TEST_F(RotationConvertTest, BadInputIsNamedAndNothingIsWritten) {
  EXPECT_THAT(ErrorOf(Command({kGoldenV1, kGoldenV1}, "x")), HasSubstr("second file"));
  EXPECT_THAT(ErrorOf(Command({"LICENSE", kGoldenV1}, "x")), HasSubstr("LICENSE"));
  EXPECT_THAT(ErrorOf(Command({"LICENSE"}, "x")), HasSubstr("LICENSE"));
  RotationConvertCommand command = Command({kGoldenV1, kGoldenV2}, "x");
  command.format = "v2";
  EXPECT_THAT(ErrorOf(command), HasSubstr("--side"));
  command.side = "v";
  command.format = "v1";
  EXPECT_THAT(ErrorOf(command), HasSubstr("use v2"));
  command.format = "v2";
  command.kv_heads = 3;
  EXPECT_THAT(ErrorOf(command), HasSubstr("2 KV heads, 3"));
}

}  // namespace
}  // namespace crumb::tools
