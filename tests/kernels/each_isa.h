// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/kernels/shapes.h"

namespace crumb::kernels {

// Runs under the instruction set of its parameter, where the machine has it.
class EachIsa : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!SelectCpuIsa(GetParam())) GTEST_SKIP() << "needs a CPU with " << CpuIsaName(GetParam());
  }

 private:
  IsaScope scope_;
};

inline std::string IsaNameOf(const testing::TestParamInfo<CpuIsa>& isa) {
  return std::string(CpuIsaName(isa.param));
}

}  // namespace crumb::kernels
