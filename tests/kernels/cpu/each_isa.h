// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/shapes.h"

namespace crumb::kernels {

// Runs a test under the instruction set of its parameter, if the machine has it.
class EachIsa : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!SelectCpuIsa(GetParam())) GTEST_SKIP() << "needs a CPU with " << CpuIsaName(GetParam());
  }

  // Quantizes `window` with this instruction set and with the portable code: same bytes and status.
  template <class Window>
  void ExpectSameBytesAsPortable(const Window& window) {
    uint32_t status = 0, portable_status = 0;
    const std::vector<uint8_t> tile = window.Quantize(&status);
    ASSERT_TRUE(SelectCpuIsa(CpuIsa::kPortable));
    const std::vector<uint8_t> portable = window.Quantize(&portable_status);
    ASSERT_TRUE(SelectCpuIsa(GetParam()));
    EXPECT_EQ(status, portable_status);
    EXPECT_TRUE(tile == portable);
  }

 private:
  IsaScope scope_;
};

inline std::string IsaNameOf(const testing::TestParamInfo<CpuIsa>& isa) {
  return std::string(CpuIsaName(isa.param));
}

}  // namespace crumb::kernels
