// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/block_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace crumb::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(BlockTraceTest, IdsAreDenseInOrderOfAppearance) {
  BlockTrace trace;
  trace.Add(std::vector<uint64_t>{900, 17, UINT64_MAX});
  trace.Add({});
  trace.Add(std::vector<uint64_t>{17, 5});
  EXPECT_EQ(trace.requests(), 3u);
  EXPECT_EQ(trace.blocks(), 5u);
  EXPECT_EQ(trace.distinct(), 4u);
  EXPECT_THAT(trace.request(0), ElementsAre(0, 1, 2));
  EXPECT_THAT(trace.request(1), ElementsAre());
  EXPECT_THAT(trace.request(2), ElementsAre(1, 3));
}

TEST(ParseTraceLineTest, FindsTheIdsAmongOtherMembers) {
  EXPECT_THAT(*ParseTraceLine(R"({"timestamp": 27, "hash_ids": [3, 0,18446744073709551615]})"),
              ElementsAre(3, 0, UINT64_MAX));
  EXPECT_THAT(
      *ParseTraceLine(
          R"( { "a\"]" : {"b":[1,{"hash_ids":[9]}], "c":-1.5e3}, "hash_ids" : [ ] , "d":null}
)"),
      ElementsAre());
  EXPECT_THAT(*ParseTraceLine("{\"hash_ids\":[1]}\r"), ElementsAre(1));
}

TEST(ParseTraceLineTest, RefusesWhatIsNoTraceLine) {
  for (const char* line :
       {"", "[]", "{", "{}", "{\"hash_ids\"}", "{\"hash_ids\": 3}", "{\"hash_ids\": [1, 2}",
        "{\"hash_ids\": [1 2]}", "{\"hash_ids\": [1,]}", "{\"hash_ids\": [-1]}",
        "{\"hash_ids\": [1.5]}", "{\"hash_ids\": [18446744073709551616]}",
        "{\"hash_ids\": [\"1\"]}", "{\"hash_ids\": [1]", "{\"hash_ids\": [1]} x",
        "{\"hash_ids\": [1], \"hash_ids\": [2]}", "{\"hash_ids\": [1], \"x\": \"", "{\"a\": }",
        "{\"hash_ids\": [1], \"x\\"}) {
    EXPECT_EQ(ParseTraceLine(line).status().code(), absl::StatusCode::kInvalidArgument) << line;
  }
  std::string deep = "{\"x\": " + std::string(100000, '[');
  EXPECT_EQ(ParseTraceLine(deep).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ParseTraceLineTest, EveryTruncationIsRefused) {
  const std::string line = R"({"t": "a", "hash_ids": [12, 3], "m": {"k": [1]}})";
  ASSERT_TRUE(ParseTraceLine(line).ok());
  for (size_t n = 0; n < line.size(); ++n) {
    EXPECT_FALSE(ParseTraceLine(line.substr(0, n)).ok()) << n;
  }
}

TEST(ReadTraceTest, NamesTheBadLine) {
  std::istringstream in("{\"hash_ids\": [1, 2]}\n\n{\"hash_ids\": [1, oops]}\n");
  const absl::Status status = ReadTrace(in, "sample").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("sample line 3"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("'oops"));
}

TEST(ReadTraceTest, ReadsAllLines) {
  std::istringstream in("{\"hash_ids\": [1, 2]}\n\n{\"hash_ids\": [2]}");
  const absl::StatusOr<BlockTrace> trace = ReadTrace(in, "sample");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->requests(), 2u);
  EXPECT_EQ(trace->distinct(), 2u);
}

TEST(ReadTraceTest, EmptyAndAbsentTracesAreErrors) {
  std::istringstream in("\n");
  EXPECT_EQ(ReadTrace(in, "sample").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadTraceFile("/nonexistent/trace").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace crumb::bench
