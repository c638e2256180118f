// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace crumb::bench {
namespace {

TEST(GpuRunTest, JsonKeepsWhatAShellPassed) {
  GpuRun run;
  run.device = "NVIDIA H200";
  run.multiprocessors = 132;
  run.driver = "580.95.05";
  run.driver_cuda = 13010;
  run.cuda = 13000;
  run.commit = "a\\b";
  const char* arguments[] = {"/somewhere/crumb-x-bench", "--commit", "say \"hi\"\n"};
  run.SetCommand("crumb-x-bench", 3, arguments);
  const auto json = nlohmann::json::parse("{" + GpuRunJson(run) + "}");
  EXPECT_EQ(json["device"], "NVIDIA H200");
  EXPECT_EQ(json["multiprocessors"], 132);
  EXPECT_EQ(json["driver"], "580.95.05");
  EXPECT_EQ(json["driver_cuda"], 13010);
  EXPECT_EQ(json["cuda"], 13000);
  EXPECT_EQ(json["commit"], "a\\b");
  EXPECT_EQ(json["command"], "crumb-x-bench --commit say \"hi\" ");
  EXPECT_EQ(json.size(), 7u);
}

TEST(GpuRunTest, AFigureThatWasNotRequestedSaysSo) {
  const auto json = nlohmann::json::parse("{" + GpuRunJson({}) + "}");
  EXPECT_EQ(json["device"], "none");
  EXPECT_EQ(json["driver"], "unknown");
  EXPECT_EQ(json["commit"], "unknown");
}

}  // namespace
}  // namespace crumb::bench
