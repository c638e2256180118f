// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/replay_workload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <set>

#include "bench/synthetic_traces.h"

namespace crumb::bench {
namespace {

BlockTrace TraceOf(const std::vector<std::vector<uint64_t>>& requests) {
  BlockTrace trace;
  for (const std::vector<uint64_t>& request : requests) trace.Add(request);
  return trace;
}

size_t HitsOf(const BlockTrace& trace, std::string_view policy, size_t capacity) {
  const absl::StatusOr<ReplayRow> row = Replay(trace, policy, capacity);
  EXPECT_TRUE(row.ok()) << row.status();
  return row->hits;
}

TEST(ReplaySizesTest, BytesPerTokenFollowFromTheTiles) {
  EXPECT_EQ(*BytesPerToken("qwen3-8b", kernels::PageFormat::kBf16), 147456u);
  EXPECT_EQ(*BytesPerToken("qwen3-8b", kernels::PageFormat::kInt2), 20736u);
  EXPECT_EQ(*BytesPerToken("qwen3-32b", kernels::PageFormat::kBf16), 262144u);
  const absl::Status unknown = BytesPerToken("gpt", kernels::PageFormat::kBf16).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.message()), ::testing::HasSubstr("qwen3-8b"));
}

TEST(ReplaySizesTest, CapacityIsWholeBlocks) {
  EXPECT_EQ(*CapacityBlocks(64, 20736), 6028u);
  EXPECT_EQ(*CapacityBlocks(64, 147456), 847u);
  EXPECT_EQ(*CapacityBlocks(512e-9 * 3, 1), 3u);
  for (const double gb : {0.0, -1.0, 511e-9, 1e30}) {
    EXPECT_EQ(CapacityBlocks(gb, 1).status().code(), absl::StatusCode::kInvalidArgument) << gb;
  }
}

TEST(ReplaySizesTest, FormatsAreNamed) {
  EXPECT_EQ(*ParseReplayFormat("bf16"), kernels::PageFormat::kBf16);
  EXPECT_EQ(*ParseReplayFormat("int2"), kernels::PageFormat::kInt2);
  EXPECT_EQ(ParseReplayFormat("fp8").status().code(), absl::StatusCode::kInvalidArgument);
}

// Computed by hand for capacity 3. lru: [1 2 3] keeps 1 2 3; [4] drops leaf 3, then [1 2 3] hits 1
// 2 and drops 4; [4] drops 3; [1 2] hits both. fifo: [4] drops 1; [1 2 3] hits nothing, inserts 1
// and drops 2; [4] hits; [1 2] hits 1, inserts 2 and drops 3.
TEST(ReplayTest, RulesByHand) {
  const BlockTrace trace = TraceOf({{1, 2, 3}, {4}, {1, 2, 3}, {4}, {1, 2}});
  EXPECT_EQ(HitsOf(trace, "lru", 3), 4u);
  EXPECT_EQ(HitsOf(trace, "fifo", 3), 2u);
  const ReplayRow row = *Replay(trace, "lru", 3);
  EXPECT_EQ(row.requests, 5u);
  EXPECT_EQ(row.blocks, 10u);
  EXPECT_DOUBLE_EQ(row.hit_rate, 0.4);
  EXPECT_EQ(row.evictions, 3u);
  EXPECT_EQ(row.capacity_blocks, 3u);
}

// A hit ends at the first absent block, whatever follows it: fifo dropped 1, and 2 is still
// present.
TEST(ReplayTest, NothingHitsBehindAGap) {
  const BlockTrace trace = TraceOf({{1, 2}, {3}, {1, 2}});
  EXPECT_EQ(HitsOf(trace, "fifo", 2), 0u);
  EXPECT_EQ(HitsOf(trace, "lru", 2), 1u);
}

TEST(ReplayTest, ARequestLargerThanTheCacheKeepsItsBeginning) {
  const BlockTrace trace = TraceOf({{1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}});
  EXPECT_EQ(HitsOf(trace, "lru", 2), 2u);
  EXPECT_EQ(HitsOf(trace, "belady", 2), 2u);
}

TEST(ReplayTest, EnoughRoomServesAllThatWasSeenBefore) {
  const BlockTrace trace = TraceOf({{1, 2, 3}, {1, 2, 4}, {5}, {1, 2, 3}});
  for (const std::string& policy : ReplayPolicyNames()) {
    EXPECT_EQ(HitsOf(trace, policy, 5), 5u) << policy;
  }
}

// Returns the most hits of any choice of evictions. It tries all prefix-closed sets of blocks that
// a cache may keep after each request.
class BestByTrying {
 public:
  BestByTrying(const std::vector<std::vector<uint64_t>>& requests, size_t capacity)
      : requests_(requests), capacity_(capacity) {}

  size_t From(size_t index, const std::set<uint64_t>& resident) {
    if (index == requests_.size()) return 0;
    size_t hits = 0;
    while (hits < requests_[index].size() && resident.contains(requests_[index][hits])) ++hits;
    std::set<uint64_t> all = resident;
    all.insert(requests_[index].begin(), requests_[index].end());
    const std::vector<uint64_t> blocks(all.begin(), all.end());
    size_t best = 0;
    for (uint32_t kept = 0; kept < (1u << blocks.size()); ++kept) {
      if (static_cast<size_t>(std::popcount(kept)) != std::min(capacity_, blocks.size())) continue;
      std::set<uint64_t> next;
      for (size_t i = 0; i < blocks.size(); ++i) {
        if (kept >> i & 1) next.insert(blocks[i]);
      }
      best = std::max(best, From(index + 1, next));
    }
    return hits + best;
  }

 private:
  const std::vector<std::vector<uint64_t>>& requests_;
  size_t capacity_;
};

TEST(ReplayTest, BeladyIsTheOptimum) {
  const std::vector<std::vector<uint64_t>> chains = {{0, 1, 2}, {0, 1, 3}, {0, 4}, {5}, {5, 6}};
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    std::vector<std::vector<uint64_t>> requests;
    for (int i = 0; i < 6; ++i) requests.push_back(chains[random() % chains.size()]);
    for (const size_t capacity : {2u, 3u}) {
      EXPECT_EQ(HitsOf(TraceOf(requests), "belady", capacity),
                BestByTrying(requests, capacity).From(0, {}));
    }
  }
}

TEST(ReplayTest, BadArgumentsAreRefused) {
  const BlockTrace trace = TraceOf({{1}});
  EXPECT_EQ(Replay(trace, "mru", 3).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Replay(trace, "mru", 3).status().message()),
              ::testing::HasSubstr("belady"));
  EXPECT_EQ(Replay(trace, "lru", 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ReplayWorkloadTest, GivesARowPerCapacityAndPolicy) {
  ReplayOptions options;
  options.synthetic = "loop";
  options.capacities_gb = {10, 20};
  options.policies = {"lru", "default"};
  const absl::StatusOr<std::vector<ReplayRow>> rows = RunReplayWorkload(options);
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(rows->size(), 4u);
  EXPECT_EQ((*rows)[1].policy, "default");
  EXPECT_EQ((*rows)[1].capacity_gb, 10);
  EXPECT_EQ((*rows)[1].capacity_blocks, 941u);
  EXPECT_GT((*rows)[1].hit_rate, (*rows)[0].hit_rate);
}

TEST(ReplayWorkloadTest, TakesOneSourceOfRequests) {
  ReplayOptions options;
  EXPECT_EQ(RunReplayWorkload(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.trace_path = "/nonexistent/trace";
  EXPECT_EQ(RunReplayWorkload(options).status().code(), absl::StatusCode::kNotFound);
  options.synthetic = "zipf";
  EXPECT_EQ(RunReplayWorkload(options).status().code(), absl::StatusCode::kInvalidArgument);
}

// The default policy must not be worse than these bounds; docs/replay.md has the whole table.
class DefaultAgainstLruTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DefaultAgainstLruTest, NeverFallsMuchBehind) {
  const BlockTrace trace = *MakeSyntheticTrace(GetParam(), /*seed=*/3);
  for (const double share : {0.01, 0.1, 0.7}) {
    const size_t capacity = static_cast<size_t>(share * static_cast<double>(trace.distinct()));
    const double lru = Replay(trace, "lru", capacity)->hit_rate;
    EXPECT_GE(Replay(trace, "default", capacity)->hit_rate, 0.99 * lru) << share;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, DefaultAgainstLruTest,
                         ::testing::ValuesIn(SyntheticFamilyNames()));

}  // namespace
}  // namespace crumb::bench
