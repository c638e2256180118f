// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode/decode_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace crumb::bench {
namespace {

using ::testing::HasSubstr;

DecodeRun TestRun() {
  DecodeRun run;
  run.gpu.device = "a \"GPU\"";
  run.gpu.commit = "abc";
  run.read_tbps = 4.0;
  run.copy_tbps = 2.0;
  run.context = 102400;
  run.memory_gb = 80;
  return run;
}

DecodeRow RowOf(KvFormat kv, int batch, double step_us, double evict_us) {
  DecodeRow row;
  row.kv = kv;
  row.batch = batch;
  row.step_us = step_us;
  row.evict_us = evict_us;
  row.sane = true;
  return row;
}

DecodeRows Measured() {
  return {*ModelShapeNamed("qwen3-4b"),
          {RowOf(KvFormat::kBf16, 1, 6000, 0), RowOf(KvFormat::kBf16, 4, 16000, 0),
           RowOf(KvFormat::kInt2, 1, 2999, 64), RowOf(KvFormat::kInt2, 32, 19990, 640),
           RowOf(KvFormat::kInt2, 40, 24000, 640)}};
}

TEST(DecodeReportTest, AWindowCountsAsOneOf64Steps) {
  const DecodeRow row = RowOf(KvFormat::kInt2, 32, 19990, 640);
  EXPECT_DOUBLE_EQ(row.MeanStepUs(), 20000);
  EXPECT_DOUBLE_EQ(row.TokensPerSecond(), 1600);
}

TEST(DecodeReportTest, GainsAreThoseOfTheLargestBatches) {
  const DecodeGains gains = GainsOf(TestRun(), Measured());
  EXPECT_EQ(gains.largest_bf16, 4);
  EXPECT_EQ(gains.largest_int2, 32);
  EXPECT_DOUBLE_EQ(gains.batch_1, 2.0);
  EXPECT_DOUBLE_EQ(gains.per_gpu, 1600.0 / 250.0);
  EXPECT_NEAR(gains.batch_1_of_bytes, 2.27, 0.01);
  EXPECT_NEAR(gains.per_gpu_of_bytes, 7.07, 0.01);
  DecodeRows without = Measured();
  without.rows.erase(without.rows.begin(), without.rows.begin() + 2);
  EXPECT_EQ(GainsOf(TestRun(), without).batch_1, 0);
  EXPECT_THAT(GainsText(TestRun(), without), HasSubstr("INT2 over BF16: not measured at batch 1"));
  EXPECT_THAT(DecodeJson(TestRun(), {without}), HasSubstr("\"gain_batch_1\": null"));
  EXPECT_EQ(GainsOf(TestRun(), without).per_gpu, 0);
}

TEST(DecodeReportTest, JsonHasTheFloorOfTheBytes) {
  const auto json = nlohmann::json::parse(DecodeJson(TestRun(), {Measured(), Measured()}));
  EXPECT_EQ(json["device"], "a \"GPU\"");
  EXPECT_EQ(json["commit"], "abc");
  ASSERT_EQ(json["shapes"].size(), 2u);
  const auto& shape = json["shapes"][1];
  EXPECT_EQ(shape["shape"], "qwen3-4b");
  EXPECT_EQ(shape["largest_batch"]["int2"], 32);
  ASSERT_EQ(shape["rows"].size(), 5u);
  const auto& row = shape["rows"][3];
  const auto bytes =
      static_cast<double>(StepBytes(Measured().model, SequenceOf(102400), KvFormat::kInt2, 32));
  EXPECT_EQ(row["bytes"].get<double>(), bytes);
  EXPECT_NEAR(row["floor_us"].get<double>(), bytes / 2e6, 0.1);
  EXPECT_NEAR(row["percent_of_floor"].get<double>(), bytes / 2e6 / 200, 0.1);
  EXPECT_NEAR(row["percent_of_read"].get<double>(), bytes / 4e6 / 200, 0.1);
  EXPECT_EQ(row["fits_memory"], true);
  EXPECT_EQ(shape["rows"][4]["fits_memory"], false);
}

TEST(DecodeReportTest, TextSaysWhatIsNoNumber) {
  DecodeRow row = RowOf(KvFormat::kInt2, 1, 3000, 0);
  const ModelShape model = Measured().model;
  EXPECT_THAT(RowText(TestRun(), model, row), Not(HasSubstr("no numbers")));
  row.sane = false;
  EXPECT_THAT(RowText(TestRun(), model, row), HasSubstr("no numbers"));
}

}  // namespace
}  // namespace crumb::bench
