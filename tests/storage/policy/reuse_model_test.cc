// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/reuse_model.h"

#include <gtest/gtest.h>

namespace crumb::storage {
namespace {

TEST(ReuseModelTest, WorthFallsWithAgeBeforeAnythingIsKnown) {
  const ReuseModel model;
  for (size_t c = 0; c < ReuseModel::kClasses; ++c) {
    for (size_t age = 1; age < ReuseModel::kAges; ++age) {
      EXPECT_LT(model.Worth(c, age), model.Worth(c, age - 1)) << c << " " << age;
    }
  }
}

TEST(ReuseModelTest, ClassesGrowWithUses) {
  EXPECT_EQ(ReuseModel::ClassOf(0), 0u);
  EXPECT_EQ(ReuseModel::ClassOf(1), 1u);
  for (uint32_t uses = 1; uses < 100; ++uses) {
    EXPECT_GE(ReuseModel::ClassOf(uses), ReuseModel::ClassOf(uses - 1));
  }
  EXPECT_EQ(ReuseModel::ClassOf(UINT32_MAX), ReuseModel::kClasses - 1);
}

TEST(ReuseModelTest, AgeCountsEpochsUpToTheLast) {
  ReuseModel model;
  for (int i = 0; i < 200; ++i) model.AdvanceEpoch();
  EXPECT_EQ(model.AgeOf(200), 0u);
  EXPECT_EQ(model.AgeOf(190), 10u);
  EXPECT_EQ(model.AgeOf(3), ReuseModel::kAges - 1);
}

// In every epoch 1,000 periods of class 0 begin; all end in a use exactly `gap` epochs later.
void Teach(ReuseModel& model, uint32_t gap, int epochs) {
  for (int i = 0; i < epochs; ++i) {
    for (int k = 0; k < 1000; ++k) {
      if (model.epoch() >= gap) {
        model.End(0, model.epoch() - gap, ReuseModel::Ending::kUsed);
      }
      model.Begin(0);
    }
    model.AdvanceEpoch();
  }
}

// A use that is sure to come d epochs from now, within the epoch, is worth 1 / (d + 1) per epoch.
TEST(ReuseModelTest, WorthOfACertainUseIsOneOverTheWait) {
  constexpr uint32_t kGap = 9;
  ReuseModel model;
  Teach(model, kGap, 300);
  for (uint32_t age = 0; age <= kGap; ++age) {
    EXPECT_NEAR(model.Worth(0, age), 1.0 / (kGap - age + 1), 0.01) << age;
  }
  EXPECT_LT(model.Worth(0, kGap + 2), 0.05);
}

TEST(ReuseModelTest, ForgetsAnOldHabit) {
  ReuseModel model;
  Teach(model, 9, 300);
  const double before = model.Worth(0, 9);
  for (int i = 0; i < 1500; ++i) {
    for (int k = 0; k < 1000; ++k) model.Begin(0);
    for (int k = 0; k < 1000 && i >= 60; ++k) {
      model.End(0, model.epoch() - 60, ReuseModel::Ending::kGivenUp);
    }
    model.AdvanceEpoch();
  }
  EXPECT_LT(model.Worth(0, 9), before / 20);
}

// A class that has seen nothing is taken for the average one.
TEST(ReuseModelTest, UnknownClassLeansOnAllTogether) {
  ReuseModel model;
  Teach(model, 4, 300);
  for (size_t age = 0; age <= 4; ++age) {
    EXPECT_NEAR(model.Worth(5, age), model.Worth(0, age), 0.02) << age;
  }
}

}  // namespace
}  // namespace crumb::storage
