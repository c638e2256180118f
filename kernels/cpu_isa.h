// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

// Which CPU instructions the kernels use. Chosen once at start: the best the machine has.
namespace crumb::kernels {

enum class CpuIsa {
  kPortable = 0,
  kAvx2 = 1,        // AVX2, FMA, F16C
  kAvx512 = 2,      // AVX-512 F, BW, VL, DQ
  kAvx512Vnni = 3,  // and VNNI, BF16
};

// The best instruction set this machine can run.
CpuIsa BestCpuIsa();

// The one in use. Starts as BestCpuIsa().
CpuIsa ActiveCpuIsa();

// Uses `isa` from now on, for tests and benchmarks. Returns false and changes nothing when the
// machine lacks it. Not safe while other threads are inside a kernel.
bool SelectCpuIsa(CpuIsa isa);

std::string_view CpuIsaName(CpuIsa isa);

}  // namespace crumb::kernels
