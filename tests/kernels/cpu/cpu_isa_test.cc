// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu_isa.h"

#include <iterator>
#include <set>
#include <string_view>

#include "gtest/gtest.h"
#include "tests/kernels/shapes.h"

namespace crumb::kernels {
namespace {

TEST(CpuIsa, StartsWithTheBest) { EXPECT_EQ(ActiveCpuIsa(), BestCpuIsa()); }

TEST(CpuIsa, EveryMachineRunsPortable) {
  IsaScope scope;
  EXPECT_TRUE(SelectCpuIsa(CpuIsa::kPortable));
  EXPECT_EQ(ActiveCpuIsa(), CpuIsa::kPortable);
}

TEST(CpuIsa, SelectingChangesTheActiveOneOrNothing) {
  IsaScope scope;
  for (const CpuIsa isa : kAllIsas) {
    const CpuIsa before = ActiveCpuIsa();
    const CpuIsa expected = SelectCpuIsa(isa) ? isa : before;
    EXPECT_EQ(ActiveCpuIsa(), expected);
    // Every instruction set below the best one runs too.
    EXPECT_EQ(expected == isa, isa <= BestCpuIsa());
  }
}

TEST(CpuIsa, NamesDiffer) {
  std::set<std::string_view> names;
  for (const CpuIsa isa : kAllIsas) names.insert(CpuIsaName(isa));
  EXPECT_EQ(names.size(), std::size(kAllIsas));
}

}  // namespace
}  // namespace crumb::kernels
