// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu_isa.h"

#include <atomic>

#include "kernels/cpu/kernel_table.h"

namespace crumb::kernels {
namespace {

bool MachineHas(CpuIsa isa) { return isa == CpuIsa::kPortable; }

std::atomic<CpuIsa>& Active() {
  static std::atomic<CpuIsa> active{BestCpuIsa()};
  return active;
}

}  // namespace

CpuIsa BestCpuIsa() { return CpuIsa::kPortable; }

CpuIsa ActiveCpuIsa() { return Active().load(std::memory_order_relaxed); }

bool SelectCpuIsa(CpuIsa isa) {
  if (!MachineHas(isa)) return false;
  Active().store(isa, std::memory_order_relaxed);
  return true;
}

std::string_view CpuIsaName(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable:
      return "portable";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

const KernelTable& ActiveKernels() { return PortableKernels(); }

}  // namespace crumb::kernels
