// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/device/pool_budget.h"

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

using Exceeded = PoolBudget::Exceeded;
using Resource = PoolBudget::Resource;
using Beside = PoolBudget::Beside;

PoolOptions Options() {
  PoolOptions options;
  options.pools_max = 4;
  options.descriptors_max = 20;
  options.slots_max = 100;
  options.tenant_percent = 50;
  return options;
}

TEST(PoolBudgetTest, ATenantGetsItsPartAndAllTenantsTheTotal) {
  PoolBudget budget(Options());
  budget.Take("a", {1, 10, 30});
  EXPECT_EQ(budget.Check("a", {1, 0, 20}).exceeded, Exceeded::kNone);
  const PoolBudget::Verdict own = budget.Check("a", {1, 1, 20});
  EXPECT_EQ(own.exceeded, Exceeded::kTenant);
  EXPECT_EQ(own.resource, Resource::kDescriptors);

  budget.Take("b", {2, 5, 50});
  budget.Take("c", {0, 0, 20});
  const PoolBudget::Verdict total = budget.Check("c", {1, 1, 1});
  EXPECT_EQ(total.exceeded, Exceeded::kTotal);
  EXPECT_EQ(total.resource, Resource::kSlots);
  EXPECT_EQ(budget.Check("c", {1, 1, 0}).exceeded, Exceeded::kNone);
}

TEST(PoolBudgetTest, WithoutATenantOnlyTheTotalCounts) {
  PoolBudget budget(Options());
  EXPECT_EQ(budget.Check("", {4, 20, 100}).exceeded, Exceeded::kNone);
  EXPECT_EQ(budget.Check("", {5, 0, 0}).exceeded, Exceeded::kTotal);
}

TEST(PoolBudgetTest, EndingPoolsCountUntilTheyAreGivenBack) {
  PoolBudget budget(Options());
  budget.Take("a", {2, 10, 50});
  budget.BeginEnd("a", {1, 5, 25});
  EXPECT_EQ(budget.Check("a", {1, 5, 25}).exceeded, Exceeded::kTenant);
  EXPECT_EQ(budget.Check("a", {1, 5, 25}, Beside::kOnceEnded).exceeded, Exceeded::kNone);
  EXPECT_EQ(budget.total().descriptors, 10);

  budget.GiveBack("a", {1, 5, 25});
  EXPECT_EQ(budget.total().descriptors, 5);
  EXPECT_EQ(budget.Check("a", {1, 5, 25}).exceeded, Exceeded::kNone);
  EXPECT_EQ(budget.Check("a", {1, 5, 26}).exceeded, Exceeded::kTenant);
}

TEST(PoolBudgetTest, AnAmountThatOverflowsIsRefused) {
  PoolBudget budget(Options());
  budget.Take("a", {1, 1, 1});
  EXPECT_EQ(budget.Check("a", {0, 0, UINT64_MAX}).exceeded, Exceeded::kTenant);
  EXPECT_EQ(budget.Check("", {0, 0, UINT64_MAX}).exceeded, Exceeded::kTotal);
}

TEST(PoolBudgetTest, ASmallPercentageIsOneOfEachAtLeast) {
  PoolOptions options = Options();
  options.tenant_percent = 1;
  const PoolBudget budget(options);
  EXPECT_EQ(budget.Check("a", {1, 1, 1}).exceeded, Exceeded::kNone);
  EXPECT_EQ(budget.Check("a", {1, 2, 1}).exceeded, Exceeded::kTenant);
}

}  // namespace
}  // namespace crumb::server
