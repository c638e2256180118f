// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/crumbd_views.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::tools {
namespace {

using testing::HasSubstr;
using testing::Not;

client::CacheStats Stats() {
  client::CacheStats stats;
  stats.tiers = {{.tier = Tier::kHost,
                  .capacity_bytes = 1000,
                  .resident_bytes = 100,
                  .resident_logical_bytes = 700,
                  .pages = 2,
                  .state = "active"},
                 {.tier = Tier::kSsd,
                  .resident_bytes = 100,
                  .resident_logical_bytes = 500,
                  .state = "off: not configured"}};
  stats.lookup_tokens = {{"host", 30}, {"ssd", 10}, {"miss", 60}, {"window", 1000}};
  return stats;
}

TEST(CrumbdViewsTest, RecentWindowsAreNoRequestedTokens) {
  const HitRates rates = HitRatesOf(Stats());
  EXPECT_EQ(rates.requested_tokens, 100);
  EXPECT_EQ(rates.hit_tokens, 40);
  EXPECT_EQ(StatsJson(Stats())["hit_rate"], 0.4);
  EXPECT_EQ(StatsJson({})["hit_rate"], 0);
}

TEST(CrumbdViewsTest, BytesSavedCoverAllTiers) {
  EXPECT_EQ(BytesSavedFactor(Stats()), 6.0);
  EXPECT_EQ(BytesSavedFactor({}), 0.0);
  EXPECT_THAT(StatsText({}), HasSubstr("nothing is stored"));
  EXPECT_THAT(StatsText(Stats()), HasSubstr("6.00x less than in BF16"));
}

TEST(CrumbdViewsTest, ATierThatIsNotConfiguredIsHealthy) {
  client::CacheStats stats = Stats();
  EXPECT_EQ(HealthOf(stats), "serving");
  stats.tiers[1].state = "read-only: disk full";
  EXPECT_EQ(HealthOf(stats), "degraded: ssd read-only: disk full");
  stats.tiers[0].state = "off";
  EXPECT_EQ(HealthOf(stats), "degraded: host off, ssd read-only: disk full");
}

TEST(CrumbdViewsTest, StatesOfKeyspaces) {
  EXPECT_EQ(StateName(client::KeyspaceState::kActive), "active");
  EXPECT_EQ(StateName(client::KeyspaceState::kBf16), "bf16");
  EXPECT_EQ(StateName(client::KeyspaceState::kUnknown), "unknown");
}

TEST(CrumbdViewsTest, NodesOfAClusterAndWithoutOne) {
  client::NodeList list;
  client::NodeList::Node& draining = list.nodes.emplace_back();
  draining.id = "a";
  draining.self = true;
  draining.state = "draining";
  draining.pages_to_push = 5;
  client::NodeList::Node& other = list.nodes.emplace_back();
  other.id = "b";
  other.state = "active";
  other.transport = "ucx";
  EXPECT_THAT(NodesText(list), HasSubstr("no cluster"));
  list.view_epoch = 8;
  list.previous_epoch = 7;
  list.refused = {"c\x1b[2J: another secret"};
  const std::string text = NodesText(list);
  EXPECT_THAT(text, HasSubstr("a *"));
  EXPECT_THAT(text, HasSubstr("draining, 5 pages left"));
  EXPECT_THAT(text, HasSubstr("view 8, before it 7"));
  EXPECT_THAT(text, HasSubstr("refused: c"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));  // a node's text cannot control the terminal
  EXPECT_EQ(NodesJson(list)["nodes"][1]["transport"], "ucx");
}

TEST(CrumbdViewsTest, PlacesOfAPage) {
  client::PageLocation place;
  place.homes = {"a", "b"};
  const std::string text = PlaceText(place);
  EXPECT_THAT(text, HasSubstr("run             not known here"));
  EXPECT_THAT(text, HasSubstr("homes           a, b"));
  EXPECT_THAT(text, HasSubstr("held by         none"));
  EXPECT_THAT(text, Not(HasSubstr("no reply from")));
  place.silent = {"b"};
  EXPECT_THAT(PlaceText(place), HasSubstr("no reply from   b"));
}

}  // namespace
}  // namespace crumb::tools
