// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/text_table.h"

#include <gtest/gtest.h>

namespace crumb::tools {
namespace {

TEST(TextTableTest, AlignsTextLeftAndNumbersRight) {
  TextTable table({"name", "bytes"});
  table.AddRow({"host", "5"});
  table.AddRow({"longer name", "12345"});
  EXPECT_EQ(table.ToString(),
            "name         bytes\n"
            "host             5\n"
            "longer name  12345\n");
}

TEST(TextTableTest, MissingCellsAreEmptyAndLinesEndWithoutBlanks) {
  TextTable table({"a", "b"});
  table.AddRow({"x"});
  EXPECT_EQ(table.ToString(), "a  b\nx\n");
  EXPECT_FALSE(table.empty());
}

TEST(FormatBytesTest, PicksTheUnit) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(uint64_t{3} << 30), "3.00 GiB");
  EXPECT_EQ(FormatBytes(~uint64_t{0}), "16.00 EiB");
}

TEST(FormatUptimeTest, ShowsDaysOnlyWhenThereAreSome) {
  EXPECT_EQ(FormatUptime(3661.9), "01:01:01");
  EXPECT_EQ(FormatUptime(2 * 86400 + 5), "2d 00:00:05");
  EXPECT_EQ(FormatUptime(-1), "00:00:00");
}

TEST(FormatPercentTest, OfNothingIsADash) {
  EXPECT_EQ(FormatPercent(1, 8), "12.5 %");
  EXPECT_EQ(FormatPercent(0, 0), "-");
}

TEST(TextTableTest, CellsCannotDriveTheTerminalNorForgeRows) {
  TextTable table({"model", "state"});
  table.AddRow({"a\nb  active", "\x1b[2J"});
  EXPECT_EQ(table.ToString(), "model         state\na\\nb  active  \\x1b[2J\n");
}

}  // namespace
}  // namespace crumb::tools
