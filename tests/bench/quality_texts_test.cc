// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_texts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

namespace crumb::bench {
namespace {

class QualityTextsTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "crumb_texts_" + std::to_string(::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string File(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
    return folder_ + "/" + name;
  }
  static std::string Letters(uint32_t seed, int count) {
    std::mt19937 random(seed);
    std::string text;
    for (int i = 0; i < count; ++i) text += static_cast<char>('a' + random() % 26);
    return text;
  }

  std::string folder_;
};

TEST_F(QualityTextsTest, DifferentTextsAreApart) {
  const std::string header(900, '#');  // a common header is no shared passage
  const std::string a = File("a", header + Letters(1, 9000));
  const std::string b = File("b", header + Letters(2, 9000));
  EXPECT_TRUE(CheckTextsApart({a}, {b}).ok());
  EXPECT_TRUE(CheckTextsApart({a}, {}).ok());
}

TEST_F(QualityTextsTest, TheSameFileIsRefusedUnderAnyName) {
  const std::string a = File("a", "short");
  const std::string same = File("same", "short");
  std::filesystem::create_symlink(a, folder_ + "/link");
  for (const std::string& other : {a, same, folder_ + "/link"}) {
    const absl::Status status = CheckTextsApart({a}, {other});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << other;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("not calibrated on"));
  }
}

TEST_F(QualityTextsTest, APassageAnywhereIsRefused) {
  const std::string passage = Letters(3, 2048);
  const std::string a = File("a", Letters(4, 5001) + passage + Letters(5, 333));
  const std::string b = File("b", Letters(6, 777) + passage);
  const absl::Status status = CheckTextsApart({a}, {b});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("passage at byte"));
  EXPECT_FALSE(CheckTextsApart({b}, {a}).ok());
}

TEST_F(QualityTextsTest, MissingFilesAreNamed) {
  const absl::Status status = CheckTextsApart({folder_ + "/none"}, {File("b", "x")});
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("none"));
}

TEST(CutSequencesTest, SpreadsOverTheText) {
  std::vector<int32_t> tokens(1000);
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto few = CutSequences(tokens, 100, 3);
  ASSERT_EQ(few.size(), 3u);
  EXPECT_EQ(few[0].front(), 0);
  EXPECT_EQ(few[1].front(), 300);
  EXPECT_EQ(few[2].front(), 600);
  EXPECT_EQ(few[2].size(), 100u);
  EXPECT_EQ(CutSequences(tokens, 100, 99).size(), 10u);
  EXPECT_TRUE(CutSequences(tokens, 1001, 2).empty());
}

}  // namespace
}  // namespace crumb::bench
