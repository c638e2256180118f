// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/wire.h"

#include "gtest/gtest.h"

namespace crumb::client {
namespace {

TEST(WireTest, OutcomesMustBeAsManyAsFragments) {
  google::protobuf::RepeatedField<int> outcomes;
  outcomes.Add(v1::COMMIT_OUTCOME_STORED);
  outcomes.Add(v1::COMMIT_OUTCOME_DEDUPLICATED);
  EXPECT_EQ(OutcomesOf(outcomes, 2).value(),
            (std::vector{CommitOutcome::kStored, CommitOutcome::kDeduplicated}));
  EXPECT_EQ(OutcomesOf(outcomes, 1).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(OutcomesOf(outcomes, 3).status().code(), absl::StatusCode::kInternal);
}

TEST(WireTest, StatsWithAKeyspaceOfWrongSizeAreDataLoss) {
  v1::StatsResponse response;
  response.set_version("1.2");
  (*response.mutable_lookup_tokens())["host"] = 5;
  auto* tier = response.add_tiers();
  tier->set_tier(v1::TIER_SSD);
  tier->set_pages(3);
  tier->set_state("active");
  auto* keyspace = response.add_keyspaces();
  keyspace->set_keyspace(std::string(32, 'k'));
  keyspace->set_state(v1::KEYSPACE_STATE_BF16);
  const auto stats = StatsOf(response);
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->version, "1.2");
  EXPECT_EQ(stats->lookup_tokens.at("host"), 5);
  ASSERT_EQ(stats->tiers.size(), 1);
  EXPECT_EQ(stats->tiers[0].tier, Tier::kSsd);
  EXPECT_EQ(stats->tiers[0].pages, 3);
  EXPECT_EQ(stats->keyspaces.at(0).state, KeyspaceState::kBf16);

  keyspace->set_keyspace(std::string(31, 'k'));
  EXPECT_EQ(StatsOf(response).status().code(), absl::StatusCode::kDataLoss);
}

TEST(WireTest, LocationWithoutARunHasZeros) {
  v1::LocatePageResponse response;
  response.set_keyspace(std::string(32, 'k'));
  response.add_homes("a");
  response.add_silent("b");
  const auto place = LocationOf(response);
  ASSERT_TRUE(place.ok()) << place.status();
  EXPECT_EQ(place->run, PageKey());
  EXPECT_EQ(place->homes, std::vector<std::string>{"a"});
  EXPECT_EQ(place->silent, std::vector<std::string>{"b"});

  response.set_run("short");
  EXPECT_EQ(LocationOf(response).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace crumb::client
