// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Instructions that only evicting windows needs, as in ptx.cuh.
namespace crumb::kernels::cuda::ptx {

// Two halves, rounded towards zero: magnitudes keep their order against a bound that a half can
// hold.
__device__ __forceinline__ uint32_t PackHalfTowardsZero(float low, float high) {
  uint32_t y;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// For each half -1 as a 16-bit integer if |x| >= bound, else 0.
__device__ __forceinline__ uint32_t MagnitudesAtLeast(uint32_t x, uint32_t bound) {
  uint32_t y;
  asm("{\n .reg .b32 m;\n abs.f16x2 m, %1;\n set.ge.u32.f16x2 %0, m, %2;\n}"
      : "=r"(y)
      : "r"(x), "r"(bound));
  return y;
}

__device__ __forceinline__ uint32_t AddMagnitudes(uint32_t x, uint32_t y) {
  uint32_t sum;
  asm("{\n .reg .b32 m, n;\n abs.f16x2 m, %1;\n abs.f16x2 n, %2;\n add.rn.f16x2 %0, m, n;\n}"
      : "=r"(sum)
      : "r"(x), "r"(y));
  return sum;
}

__device__ __forceinline__ uint32_t AddHalves(uint32_t x, uint32_t y) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
}

// D = C + A B of 16 x 8 x 16, fp16 operands, fp32 accumulators.
__device__ __forceinline__ void MmaF16Onto(float (&d)[4], const float (&c)[4],
                                           const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ float SquareRoot(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace crumb::kernels::cuda::ptx
