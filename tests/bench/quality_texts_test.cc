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
#include <utility>
#include <vector>

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
  for (const std::vector<std::string>& learned : {std::vector{b}, std::vector<std::string>()}) {
    const auto shared = CheckTextsApart({a}, learned);
    ASSERT_TRUE(shared.ok()) << shared.status();
    EXPECT_EQ(*shared, 0);
  }
}

TEST_F(QualityTextsTest, TheSameFileIsRefusedUnderAnyName) {
  const std::string a = File("a", "short");
  const std::string same = File("same", "short");
  std::filesystem::create_symlink(a, folder_ + "/link");
  for (const std::string& other : {a, same, folder_ + "/link"}) {
    const absl::Status status = CheckTextsApart({a}, {other}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << other;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("not calibrated on"));
  }
}

TEST_F(QualityTextsTest, APassageAnywhereIsRefused) {
  const std::string passage = Letters(3, 9216);
  const std::string a = File("a", Letters(4, 90001) + passage + Letters(5, 333));
  const std::string b = File("b", Letters(6, 80777) + passage);
  const std::string c = File("c", Letters(7, 3000));
  for (const auto& [text, learned] : {std::pair{a, b}, std::pair{b, a}}) {
    const absl::Status refused = CheckTextsApart({c, text}, {learned}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                testing::HasSubstr(text + " and the calibration text " + learned +
                                   " share the passage at byte"));
  }
}

// Files of one project begin with the same licence, wherever they are cut.
TEST_F(QualityTextsTest, ALicenceIsCountedAndNoLeak) {
  const std::string licence = Letters(8, 2047);
  std::string a, b;
  for (uint32_t i = 0; i < 3; ++i) {
    a += licence + Letters(10 + i, 20000);
    b += licence + Letters(20 + i, 7000);
  }
  const auto shared = CheckTextsApart({File("a", a)}, {File("b", b)});
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_GE(*shared, 3 * 1024);
  EXPECT_LE(*shared, 3 * 2047);
}

TEST_F(QualityTextsTest, ManyShortPassagesAreRefused) {
  std::string a, b;
  for (uint32_t i = 0; i < 10; ++i) {
    const std::string passage = Letters(30 + i, 3000);
    a += passage + Letters(50 + i, 5000);
    b += Letters(70 + i, 4000) + passage;
  }
  const absl::Status status = CheckTextsApart({File("a", a)}, {File("b", b)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("of 80000 evaluated bytes"));
}

TEST_F(QualityTextsTest, MissingFilesAreNamed) {
  const absl::Status status = CheckTextsApart({folder_ + "/none"}, {File("b", "x")}).status();
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
