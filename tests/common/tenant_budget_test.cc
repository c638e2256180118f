// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/tenant_budget.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

namespace crumb {
namespace {

using Taken = TenantBudget::Taken;

uint64_t TakeAll(TenantBudget& budget, const std::string& tenant) {
  uint64_t count = 0;
  while (budget.Take(tenant) == Taken::kYes) ++count;
  return count;
}

TEST(TenantBudgetTest, WithoutTenantsTheTotalAloneCounts) {
  TenantBudget budget(16, 100);
  EXPECT_EQ(TakeAll(budget, "a"), 16u);
  EXPECT_EQ(budget.Take("b"), Taken::kTotalFull);
  budget.Give("a");
  EXPECT_EQ(budget.Take("b"), Taken::kYes);
}

TEST(TenantBudgetTest, EachTenantGetsAPartOfWhatOthersLeave) {
  TenantBudget budget(16, 50);
  EXPECT_EQ(TakeAll(budget, "a"), 8u);
  EXPECT_EQ(budget.Take("a"), Taken::kPartFull);
  EXPECT_EQ(TakeAll(budget, "b"), 4u);
  EXPECT_EQ(TakeAll(budget, "c"), 2u);
  EXPECT_EQ(TakeAll(budget, "d"), 1u);
  EXPECT_EQ(TakeAll(budget, "e"), 1u) << "the first unit, while there is one";
  EXPECT_EQ(budget.Take("f"), Taken::kTotalFull);
  budget.Give("a", 8);
  EXPECT_EQ(TakeAll(budget, "b"), 2u) << "half of 12";
}

TEST(TenantBudgetTest, BytesAreTakenWholeOrNotAtAll) {
  const uint64_t gib = uint64_t{1} << 30;
  TenantBudget budget(uint64_t{1} << 60, 50);  // sums of percents must not overflow
  EXPECT_EQ(budget.Take("a", (uint64_t{1} << 59) + gib), Taken::kPartFull);
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(budget.Take("a", (uint64_t{1} << 59) - gib), Taken::kYes);
  EXPECT_EQ(budget.Take("b", UINT64_MAX), Taken::kTotalFull);
}

TEST(TenantBudgetTest, NothingIsAlwaysGranted) {
  TenantBudget budget(100, 50);
  ASSERT_EQ(budget.Take("a", 50), Taken::kYes);
  ASSERT_EQ(budget.Take("b", 25), Taken::kYes);
  EXPECT_EQ(budget.Take("a", 1), Taken::kPartFull) << "a's part is 37 since b came";
  EXPECT_EQ(budget.Take("a", 0), Taken::kYes);
  budget.Add("c", 100);
  EXPECT_EQ(budget.Take("a", 0), Taken::kYes) << "the total is passed";
  TenantBudget together(1, 100);
  together.Add("", 2);
  EXPECT_EQ(together.Take("", 0), Taken::kYes);
}

TEST(TenantBudgetTest, AddGoesBeyondTheBound) {
  TenantBudget budget(4, 50);
  budget.Add("a", 6);
  EXPECT_EQ(budget.Take("b"), Taken::kTotalFull);
  budget.Give("a", 6);
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(budget.used_by("a"), 0u);
}

// Compares with the rule, computed in exact arithmetic from the held units.
TEST(TenantBudgetTest, RandomHistoriesKeepTheRule) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const uint64_t total = 1 + random() % 40;
    const auto percent = static_cast<int64_t>(1 + random() % 99);
    TenantBudget budget(total, percent);
    uint64_t held[3] = {};
    for (int step = 0; step < 200; ++step) {
      const size_t who = random() % 3;
      const std::string name(1, static_cast<char>('a' + who));
      const uint64_t others = held[0] + held[1] + held[2] - held[who];
      if (random() % 2 == 0 && held[who] > 0) {
        const uint64_t amount = 1 + random() % held[who];
        budget.Give(name, amount);
        held[who] -= amount;
        continue;
      }
      const uint64_t amount = random() % 4;
      const bool fits = others + held[who] + amount <= total;
      const bool part =
          amount == 0 || (held[who] == 0 && amount == 1) ||
          (held[who] + amount) * 100 <= (total - others) * static_cast<uint64_t>(percent);
      const Taken taken = budget.Take(name, amount);
      ASSERT_EQ(taken == Taken::kYes, (fits || amount == 0) && part) << total << " " << percent;
      if (taken == Taken::kYes) held[who] += amount;
    }
    EXPECT_EQ(budget.used(), held[0] + held[1] + held[2]);
  }
}

TEST(TenantBudgetTest, GrantsComeBackFromAllThreads) {
  TenantBudget apart(64, 50);
  TenantBudget together(64, 100);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 2'000; ++round) {
        TenantGrant one(apart, std::string(1, static_cast<char>('a' + i)));
        TenantGrant other(together, "", 3);
        EXPECT_EQ(one.taken(), Taken::kYes);
        EXPECT_EQ(other.taken(), Taken::kYes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(apart.used(), 0u);
  EXPECT_EQ(together.used(), 0u);
}

TEST(TenantBudgetTest, ErrorsNameTheSetting) {
  EXPECT_TRUE(TenantBudget::Error(Taken::kYes, "limits.x").ok());
  EXPECT_EQ(TenantBudget::Error(Taken::kTotalFull, "limits.x").code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_NE(TenantBudget::Error(Taken::kPartFull, "limits.x").ToString().find("part_max_percent"),
            std::string::npos);
}

}  // namespace
}  // namespace crumb
