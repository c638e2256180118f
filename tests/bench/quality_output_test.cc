// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

namespace crumb::bench {
namespace {

QualityResult TwoMethods() {
  QualityResult result;
  result.sequences = 16;
  result.contexts = {1024};
  result.exact_perplexity = {5.0};
  QualityRow bf16, oscar;
  bf16.method = "bf16";
  bf16.bits = 16.0;
  oscar.method = "oscar";
  oscar.bits = 2.25;
  bf16.context = oscar.context = 1024;
  oscar.kl = {0.04, 0.003};
  oscar.perplexity = {5.2, 0.1};
  oscar.kl_over_oscar = {1.0, 1.0, 1.0};
  oscar.has_passkeys = true;
  oscar.passkey.recall = {0.96, 0.006};
  oscar.passkey.below_bf16 = {0.03, 0.02, 0.04};
  oscar.passkey.by_depth = {{.from = 0.0, .to = 1.0, .count = 10, .recall = {0.9, 0.1}}};
  result.rows = {bf16, oscar};
  result.passkeys = 10;
  return result;
}

TEST(QualityOutputTest, RowsHaveTheirFiguresAndErrors) {
  const nlohmann::json json = QualityJson(TwoMethods());
  ASSERT_EQ(json["rows"].size(), 2u);
  const nlohmann::json& row = json["rows"][1];
  EXPECT_EQ(row["method"], "oscar");
  EXPECT_EQ(row["bits"], 2.25);
  EXPECT_EQ(row["kl"], 0.04);
  EXPECT_EQ(row["kl_error"], 0.003);
  EXPECT_EQ(row["ppl"], 5.2);
  EXPECT_EQ(row["passkey"], 0.96);
  EXPECT_EQ(row["passkey_below_bf16_high"], 0.04);
  EXPECT_EQ(row["passkey_by_depth"][0]["passkeys"], 10);
  EXPECT_FALSE(json["rows"][0].contains("passkey"));
  EXPECT_FALSE(json["rows"][0].contains("kl_over_oscar"));
  EXPECT_THAT(QualityText(TwoMethods()), testing::HasSubstr("3.00 [2.00, 4.00]"));
}

TEST(SvgPlotTest, DrawsOneMarkAndLabelPerPoint) {
  const std::string svg = ScatterSvg({"a & b", "x", "y"}, {{"one", 2.25, 0.01, 0.009, 0.011},
                                                           {"two<3", 4.25, 0.001, 0.001, 0.001},
                                                           {"none", 3.0, 0.0, 0.0, 0.0}});
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, testing::EndsWith("</svg>\n"));
  EXPECT_THAT(svg, testing::HasSubstr(">one</text>"));
  EXPECT_THAT(svg, testing::HasSubstr(">two&lt;3</text>"));
  EXPECT_THAT(svg, testing::HasSubstr("a &amp; b"));
  EXPECT_THAT(svg, testing::Not(testing::HasSubstr(">none<")));
  const std::regex circle("<circle cx=\"([0-9.]+)\" cy=\"([0-9.]+)\"");
  std::vector<std::pair<double, double>> marks;
  for (std::sregex_iterator it(svg.begin(), svg.end(), circle), end; it != end; ++it) {
    marks.emplace_back(std::stod((*it)[1]), std::stod((*it)[2]));
  }
  ASSERT_EQ(marks.size(), 2u);
  EXPECT_LT(marks[0].first, marks[1].first);    // more bits lie to the right
  EXPECT_LT(marks[0].second, marks[1].second);  // more KL lies higher
}

TEST(QualityOutputTest, ThePlotLeavesBf16Out) {
  const std::string svg = QualityPlot(TwoMethods());
  EXPECT_THAT(svg, testing::HasSubstr(">oscar</text>"));
  EXPECT_THAT(svg, testing::Not(testing::HasSubstr(">bf16<")));
}

}  // namespace
}  // namespace crumb::bench
