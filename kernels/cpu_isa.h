// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

// The CPU instruction set that the kernels use. The best one that the machine has is selected at
// start.
namespace crumb::kernels {

enum class CpuIsa {
  kPortable = 0,
  kAvx2 = 1,        // AVX2, FMA, F16C
  kAvx512 = 2,      // AVX-512 F, BW, VL, DQ
  kAvx512Vnni = 3,  // kAvx512, VNNI, BF16
};

// Returns the best instruction set that this machine can run.
CpuIsa BestCpuIsa();

// Returns the instruction set in use. It starts as BestCpuIsa().
CpuIsa ActiveCpuIsa();

// Selects `isa` from now on, for tests and benchmarks. Returns false and changes nothing if the
// machine does not have it. REQUIRES: no other thread is inside a kernel.
bool SelectCpuIsa(CpuIsa isa);

std::string_view CpuIsaName(CpuIsa isa);

}  // namespace crumb::kernels
