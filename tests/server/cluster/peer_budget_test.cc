// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/peer_budget.h"

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

// Holds of 0 pages, as for offers whose pages the home has: several of one node end in any order.
TEST(PartyBudgetTest, HoldsOfNothingMayOverlap) {
  PartyBudget budget(4);
  auto first = budget.Take("peer", 0);
  auto second = budget.Take("peer", 0);
  first.reset();
  second.reset();
  const auto some = budget.Take("peer", 3);
  EXPECT_EQ(budget.held("peer"), 3u);
  EXPECT_EQ(budget.Take("peer", 2), nullptr);
  EXPECT_NE(budget.Take("peer", 0), nullptr);
  EXPECT_EQ(budget.held("peer"), 3u);
}

}  // namespace
}  // namespace crumb::server
