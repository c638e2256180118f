// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

// Which CPU instructions the kernels use. Chosen once at start: the best the machine has.
namespace crumb::kernels {

enum class CpuIsa { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The best instruction set this machine can run.
CpuIsa BestCpuIsa();

// The one in use. Starts as BestCpuIsa().
CpuIsa ActiveCpuIsa();

// Uses `isa` from now on, for tests and benchmarks. Returns false and changes nothing when the
// machine lacks it. Not safe while other threads are inside a kernel.
bool SelectCpuIsa(CpuIsa isa);

std::string_view CpuIsaName(CpuIsa isa);

}  // namespace crumb::kernels
