// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The fuzz targets without a fuzzer: their seeds, and the same hostile inputs every time.
#include <set>

#include "common/logging.h"
#include "gtest/gtest.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/mutator.h"

namespace crumb::fuzz {
namespace {

// Inputs of a target; those that open stores and sessions take longer each.
constexpr int kInputs = 10000;
constexpr int kCostlyInputs = 1000;

class FuzzTargetsTest : public testing::TestWithParam<const FuzzTarget*> {};

TEST_P(FuzzTargetsTest, KeepsItsPromisesOnHostileInput) {
  SetLogSeverity(Severity::kOff);
  const FuzzTarget& target = *GetParam();
  const std::vector<std::string> seeds = target.seeds();
  ASSERT_FALSE(seeds.empty());
  target.run({});
  for (const std::string& seed : seeds) target.run(BytesOf(seed));
  const bool costly = &target == &kCallTarget || &target == &kRequestTarget ||
                      &target == &kPeerTarget || &target == &kHostImageTarget ||
                      &target == &kSessionTarget || &target == &kTakeoverTarget;
  Mutator mutator(seeds, 20);
  for (int i = 0; i < (costly ? kCostlyInputs : kInputs); ++i) {
    const std::string input = mutator.Next();
    target.run(BytesOf(input));
  }
}

INSTANTIATE_TEST_SUITE_P(All, FuzzTargetsTest, testing::ValuesIn(AllTargets()),
                         [](const auto& tested) { return std::string(tested.param->name); });

TEST(MutatorTest, MakesTheSameInputsForASeedAndMostlyNewOnes) {
  const std::vector<std::string> seeds = {"0123456789", "abcdefghij"};
  Mutator one(seeds, 1), same(seeds, 1), other(seeds, 2);
  std::set<std::string> inputs;
  int equal = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::string input = one.Next();
    EXPECT_EQ(same.Next(), input);
    equal += other.Next() == input;
    EXPECT_LE(input.size(), 10u + 8 * 64);
    inputs.insert(input);
  }
  EXPECT_LT(equal, 100);
  EXPECT_GT(inputs.size(), 800u);
}

}  // namespace
}  // namespace crumb::fuzz
