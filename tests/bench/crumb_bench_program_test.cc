// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Runs the program crumb-bench as users do.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <array>
#include <cstdio>
#include <fstream>
#include <string>

#include "nlohmann/json.hpp"
#include "tests/common/temporary_folder.h"

namespace crumb::bench {
namespace {

struct Outcome {
  int code = -1;
  std::string out;
};

Outcome RunProgram(const std::string& arguments, const std::string& program = CRUMB_BENCH_PROGRAM) {
  FILE* pipe = ::popen((program + " " + arguments + " 2>&1").c_str(), "r");
  Outcome outcome;
  std::array<char, 4096> buffer;
  for (size_t size; (size = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    outcome.out.append(buffer.data(), size);
  }
  outcome.code = WEXITSTATUS(::pclose(pipe));
  return outcome;
}

// Two conversations share the first block: 0 1 | 0 2 | 0 1 3. With room for everything, the second
// request hits one block and the third two, of 7.
TEST(CrumbBenchProgramTest, ReplaysATraceByHand) {
  const TemporaryFolder folder;
  std::ofstream trace(folder.File("trace.jsonl"));
  trace << R"({"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]})"
        << "\n"
        << R"({"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [0, 2]})"
        << "\n"
        << R"({"timestamp": 2, "input_length": 1536, "output_length": 1, "hash_ids": [0, 1, 3]})"
        << "\n";
  trace.close();
  const Outcome outcome = RunProgram("replay --trace " + folder.File("trace.jsonl") +
                                     " --capacity-gb 64 --format int2 --model qwen3-8b"
                                     " --policy lru --simulate --json");
  ASSERT_EQ(outcome.code, 0) << outcome.out;
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_NEAR(json["hit_rate"].get<double>(), 3.0 / 7, 1e-12);
  EXPECT_EQ(json["capacity_blocks"], 6028);
  EXPECT_TRUE(json.contains("machine"));
  EXPECT_TRUE(json.contains("commit"));
}

TEST(CrumbBenchProgramTest, ABadTraceIsNamedAndFails) {
  const TemporaryFolder folder;
  std::ofstream(folder.File("trace.jsonl")) << "{\"hash_ids\": [1,\n";
  const Outcome outcome = RunProgram("replay --trace " + folder.File("trace.jsonl"));
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.out.find("trace.jsonl"), std::string::npos) << outcome.out;
}

TEST(CrumbBenchProgramTest, APlotThatCannotBeWrittenShowsBeforeAnythingIsMeasured) {
  const TemporaryFolder folder;
  const Outcome outcome = RunProgram("quality --model " + folder.path() +
                                     " --text /dev/null --plot " + folder.File("no/such/plot.svg"));
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.out.find("writing " + folder.File("no/such/plot.svg")), std::string::npos)
      << outcome.out;
}

TEST(CrumbBenchProgramTest, StoreWithoutCrumbdSaysSo) {
  const TemporaryFolder folder;
  const Outcome outcome = RunProgram("store --planes grpc --socket-dir " + folder.path());
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.out.find(folder.path()), std::string::npos) << outcome.out;
}

#ifdef CRUMB_KERNEL_BENCH_PROGRAM
TEST(KernelBenchProgramTest, RefusesArgumentsThatItDoesNotKnow) {
  for (const char* wrong : {"--only abc", "--only 1,,2", "--only 3,", "--only evict:x", "--only -1",
                            "--kernel foo", "--commit", "--fast"}) {
    const Outcome outcome = RunProgram(wrong, CRUMB_KERNEL_BENCH_PROGRAM);
    EXPECT_EQ(outcome.code, 2) << wrong << ": " << outcome.out;
    EXPECT_NE(outcome.out.find("(see crumb-kernel-bench --help)"), std::string::npos)
        << outcome.out;
  }
  const Outcome help = RunProgram("--help", CRUMB_KERNEL_BENCH_PROGRAM);
  EXPECT_EQ(help.code, 0);
  EXPECT_NE(help.out.find("--kernel"), std::string::npos) << help.out;
}
#endif

}  // namespace
}  // namespace crumb::bench
