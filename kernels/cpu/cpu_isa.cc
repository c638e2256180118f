// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu_isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>

#include "kernels/cpu/kernel_table.h"

namespace crumb::kernels {
namespace {

#if defined(__x86_64__)
// Clang 14's __builtin_cpu_supports does not know the name of F16C.
bool HasF16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool MachineHas(CpuIsa isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case CpuIsa::kPortable:
      return true;
    case CpuIsa::kAvx2:
      return avx2;
    case CpuIsa::kAvx512:
      return avx512;
    case CpuIsa::kAvx512Vnni:
      return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  }
  return false;
}
#else
bool MachineHas(CpuIsa isa) { return isa == CpuIsa::kPortable; }
#endif

std::atomic<CpuIsa>& Active() {
  static std::atomic<CpuIsa> active{BestCpuIsa()};
  return active;
}

}  // namespace

CpuIsa BestCpuIsa() {
  for (const CpuIsa isa : {CpuIsa::kAvx512Vnni, CpuIsa::kAvx512, CpuIsa::kAvx2}) {
    if (MachineHas(isa)) return isa;
  }
  return CpuIsa::kPortable;
}

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
    case CpuIsa::kAvx512Vnni:
      return "avx512_vnni";
  }
  return "unknown";
}

const KernelTable& ActiveKernels() {
#if defined(__x86_64__)
  switch (ActiveCpuIsa()) {
    case CpuIsa::kPortable:
      break;
    case CpuIsa::kAvx2:
      return Avx2Kernels();
    case CpuIsa::kAvx512:
      return Avx512Kernels();
    case CpuIsa::kAvx512Vnni:
      return Avx512VnniKernels();
  }
#endif
  return PortableKernels();
}

}  // namespace crumb::kernels
