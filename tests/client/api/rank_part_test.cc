// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/worker_options.h"

#include <map>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

RankPart Part(int tp_rank, int tp_size, int pp_rank, int pp_size, int layers, int kv, int q) {
  return PartOfRank({tp_rank, tp_size, pp_rank, pp_size}, layers, kv, q).value();
}

// Checks that every tile is published by exactly one rank, and that every query head of a layer
// belongs to exactly one rank, which holds its KV head.
void ExpectPartition(int tp, int pp, int layers, int kv, int q) {
  std::map<std::pair<int, int>, int> published, attended;
  for (int stage = 0; stage < pp; ++stage) {
    for (int rank = 0; rank < tp; ++rank) {
      const RankPart part = Part(rank, tp, stage, pp, layers, kv, q);
      for (int layer = part.layers.begin; layer < part.layers.end; ++layer) {
        for (int head = part.kv_heads.begin; part.publishes && head < part.kv_heads.end; ++head) {
          ++published[{layer, head}];
        }
        for (int head = part.q_heads.begin; head < part.q_heads.end; ++head) {
          ++attended[{layer, head}];
          const int needs = head / (q / kv);
          EXPECT_TRUE(part.kv_heads.begin <= needs && needs < part.kv_heads.end);
        }
      }
      WorkerOptions options = SmallWorkerOptions();
      options.layers = layers;
      options.kv_heads = kv;
      options.q_heads = q;
      options.part = part;
      EXPECT_TRUE(options.Validate().ok()) << options.Validate();
    }
  }
  EXPECT_EQ(published.size(), static_cast<size_t>(layers) * kv);
  EXPECT_EQ(attended.size(), static_cast<size_t>(layers) * q);
  for (const auto& [tile, ranks] : published) EXPECT_EQ(ranks, 1);
  for (const auto& [head, ranks] : attended) EXPECT_EQ(ranks, 1);
}

TEST(RankPartTest, EveryDegreePartitionsTheModel) {
  for (const auto& [kv, q] : {std::pair{1, 8}, {2, 16}, {4, 16}, {4, 32}, {8, 32}, {8, 64}}) {
    for (int tp = 1; tp <= 16; ++tp) {
      if (q % tp != 0 || (kv % tp != 0 && tp % kv != 0)) continue;
      for (const int layers : {4, 13, 36}) {
        for (int pp = 1; pp <= 4; ++pp) {
          SCOPED_TRACE(testing::Message() << "tp " << tp << " pp " << pp << " layers " << layers
                                          << " heads " << kv << " of " << q);
          ExpectPartition(tp, pp, layers, kv, q);
        }
      }
    }
  }
}

TEST(RankPartTest, EightRanksOverFourKvHeads) {
  const RankPart low = Part(4, 8, 0, 1, 36, 4, 32);
  const RankPart high = Part(5, 8, 0, 1, 36, 4, 32);
  EXPECT_EQ(low.kv_heads, (IndexRange{2, 3}));
  EXPECT_EQ(high.kv_heads, (IndexRange{2, 3}));
  EXPECT_EQ(low.q_heads, (IndexRange{16, 20}));
  EXPECT_EQ(high.q_heads, (IndexRange{20, 24}));
  EXPECT_TRUE(low.publishes);
  EXPECT_FALSE(high.publishes);
}

TEST(RankPartTest, UnevenStagesBeginWithTheLongerOnes) {
  std::vector<int> sizes;
  int end = 0;
  for (int stage = 0; stage < 4; ++stage) {
    const IndexRange layers = Part(0, 1, stage, 4, 30, 4, 32).layers;
    EXPECT_EQ(layers.begin, end);
    end = layers.end;
    sizes.push_back(layers.size());
  }
  EXPECT_EQ(sizes, (std::vector<int>{8, 8, 7, 7}));
  EXPECT_EQ(end, 30);
}

TEST(RankPartTest, WhatDoesNotDivideIsRefused) {
  const auto refused = [](RankPlace place, int layers, int kv, int q) {
    return absl::IsInvalidArgument(PartOfRank(place, layers, kv, q).status());
  };
  EXPECT_TRUE(refused({0, 3, 0, 1}, 36, 8, 32));
  EXPECT_TRUE(refused({0, 6, 0, 1}, 36, 4, 24));
  EXPECT_TRUE(refused({0, 1, 0, 5}, 4, 4, 32));
  EXPECT_TRUE(refused({2, 2, 0, 1}, 36, 4, 32));
  EXPECT_TRUE(refused({-1, 2, 0, 1}, 36, 4, 32));
  EXPECT_TRUE(refused({0, 0, 0, 1}, 36, 4, 32));
  EXPECT_TRUE(refused({0, 1, 1, 1}, 36, 4, 32));
  EXPECT_TRUE(refused({0, 1, 0, 1}, 0, 4, 32));
  EXPECT_TRUE(refused({0, 1, 0, 1}, 36, 0, 32));
  EXPECT_TRUE(refused({0, 1, 0, 1}, 36, 4, 30));
}

TEST(RankPartTest, WorkersRefusePartsOutsideTheModel) {
  const auto refused = [](RankPart part) {
    WorkerOptions options = SmallWorkerOptions();  // 2 layers, 2 KV heads, 4 query heads
    options.part = part;
    return absl::IsInvalidArgument(options.Validate());
  };
  EXPECT_FALSE(refused({}));
  EXPECT_FALSE(refused({.layers = {1, 2}, .kv_heads = {1, 2}, .q_heads = {3, 4}}));
  EXPECT_TRUE(refused({.layers = {1, 3}, .kv_heads = {}, .q_heads = {}}));
  EXPECT_TRUE(refused({.layers = {2, 1}, .kv_heads = {}, .q_heads = {}}));
  EXPECT_TRUE(refused({.layers = {}, .kv_heads = {2, 3}, .q_heads = {}}));
  EXPECT_TRUE(refused({.layers = {}, .kv_heads = {1, 2}, .q_heads = {1, 3}}));
  EXPECT_TRUE(refused({.layers = {}, .kv_heads = {0, 2}, .q_heads = {0, 3}}));
  EXPECT_TRUE(refused({.layers = {}, .kv_heads = {0, 2}, .q_heads = {2, 2}}));
}

}  // namespace
}  // namespace crumb::client
