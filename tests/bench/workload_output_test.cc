// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/workload_output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/store_workload.h"

namespace crumb::bench {
namespace {

using ::testing::HasSubstr;

TEST(WorkloadOutputTest, OneReplayRowIsTheObjectItself) {
  ReplayRow row;
  row.policy = "lru";
  row.hit_rate = 0.25;
  const nlohmann::json one = ReplayJson({}, {row});
  EXPECT_EQ(one["hit_rate"], 0.25);
  EXPECT_FALSE(one.contains("rows"));
  const nlohmann::json two = ReplayJson({}, {row, row});
  EXPECT_EQ(two["rows"].size(), 2u);
  EXPECT_EQ(two["rows"][1]["policy"], "lru");
  EXPECT_THAT(ReplayText({row}), HasSubstr("0.2500"));
}

TEST(WorkloadOutputTest, CodecRowsNameTheirShareOfTheLimit) {
  CodecRow row;
  row.isa = "avx2";
  row.operation = "attention";
  row.format = "int2";
  row.context = 4096;
  row.read_fraction = 0.5;
  const nlohmann::json json = CodecJson({row});
  EXPECT_EQ(json["rows"][0]["percent_of_limit"], 50);
  EXPECT_EQ(json["rows"][0]["context"], 4096);
  EXPECT_THAT(CodecText({row}), HasSubstr("4096"));
}

TEST(StoreResultTest, WhatWasNotMeasuredIsNull) {
  StoreResult result;
  result.memory_read_gb_per_s = 10;
  StoreRow acquire;
  acquire.plane = "shm";
  acquire.operation = "acquire";
  acquire.pages_per_call = 1600;
  acquire.timed.p50_us = 500;
  StoreRow get = acquire;
  get.operation = "get";
  get.timed.gb_per_s = 5;
  get.limit = "memory read";
  get.limit_gb_per_s = 10;
  StoreRow idle;
  idle.operation = "idle";
  idle.core_percent = 0.5;
  result.rows = {acquire, get, idle};
  const nlohmann::json json = StoreJson(result);
  for (const char* name : {"gbps", "cpu_s_per_gb", "p99_us"}) {
    ASSERT_TRUE(json["rows"][0].contains(name)) << name;
    EXPECT_TRUE(json["rows"][0][name].is_null()) << name;
  }
  EXPECT_EQ(json["rows"][0]["p50_us"], 500);
  EXPECT_EQ(json["rows"][1]["percent_of_limit"], 50);
  EXPECT_EQ(json["rows"][1]["gbps"], 5);
  EXPECT_EQ(json["rows"][1]["op"], "get");
  EXPECT_EQ(json["rows"][1]["in_flight"], 1);
  EXPECT_EQ(json["rows"][2]["core_percent"], 0.5);
  EXPECT_THAT(StoreText(result), HasSubstr("0.50 % of a core"));
}

TEST(RunInfoTest, NamesMachineCommitAndCommand) {
  const char* argv[] = {"/long/path/crumb-bench", "replay", "--json"};
  const nlohmann::json info = RunInfo(3, argv);
  EXPECT_EQ(info["command"], "crumb-bench replay --json");
  EXPECT_GE(info["machine"]["cores"].get<int>(), 1);
  EXPECT_FALSE(info["commit"].get<std::string>().empty());
}

}  // namespace
}  // namespace crumb::bench
