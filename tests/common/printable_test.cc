// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/printable.h"

#include <gtest/gtest.h>

#include "common/logging.h"
#include "common/recent_log.h"

namespace crumb {
namespace {

TEST(PrintableTest, TextStaysAsItIs) {
  EXPECT_EQ(Printable(""), "");
  EXPECT_EQ(Printable("Qwen3-8B, 50 % \\n 'x' \"y\""), "Qwen3-8B, 50 % \\n 'x' \"y\"");
  EXPECT_EQ(Printable("Größe 模型 😀"), "Größe 模型 😀");
}

TEST(PrintableTest, ControlsAndDirectionsBecomeVisible) {
  EXPECT_EQ(Printable("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(Printable(std::string_view("\0\x1b[31m\x7f", 7)), "\\x00\\x1b[31m\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m"),
            "\\u009b31m")
      << "a control sequence in one code point";
  EXPECT_EQ(Printable("a\u202eb\u2028c\u2066d\ufeff"), "a\\u202eb\\u2028c\\u2066d\\ufeff");
}

TEST(PrintableTest, BytesThatAreNoUtf8BecomeVisible) {
  EXPECT_EQ(Printable("a\xff"
                      "b\x80"),
            "a\\xffb\\x80");
  EXPECT_EQ(Printable("\xc0\x8a"), "\\xc0\\x8a") << "an overlong line feed";
  EXPECT_EQ(Printable("\xe0\x80\x8a"), "\\xe0\\x80\\x8a");
  EXPECT_EQ(Printable("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "a surrogate";
  EXPECT_EQ(Printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80") << "above U+10FFFF";
  EXPECT_EQ(Printable("\xe6\xa8"), "\\xe6\\xa8") << "cut off";
}

TEST(PrintableTest, LongTextIsCutAndSaysByHowMuch) {
  EXPECT_EQ(Printable("abcdef", 4), "abcd... (2 bytes more)");
  EXPECT_EQ(Printable("abcdef", 6), "abcdef");
  EXPECT_EQ(Printable("abc\n\n", 5), "abc\\n... (1 bytes more)") << "escapes are not cut in two";
  EXPECT_LT(Printable(std::string(1 << 20, '\n'), 100).size(), 150u);
}

TEST(PrintableTest, LinesKeepTheirLineFeeds) {
  EXPECT_EQ(PrintableLines("a\x1b[2J\n\nb\n"), "a\\x1b[2J\n\nb\n");
  EXPECT_EQ(PrintableLines("x"), "x");
}

TEST(PrintableTest, AHostileNameStaysWithinItsLogLine) {
  const std::string name = "x\n2026-01-01T00:00:00.000 error [1] forged\x1b[1A";
  testing::internal::CaptureStderr();
  LogWarning("keyspace set by '{}'", name);
  const std::string written = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(written.begin(), written.end(), '\n'), 1) << written;
  EXPECT_EQ(written.find("\x1b[1A"), std::string::npos);
  EXPECT_EQ(RecentLog::Process().Problems().back().text,
            "keyspace set by 'x\\n2026-01-01T00:00:00.000 error [1] forged\\x1b[1A'");
}

}  // namespace
}  // namespace crumb
