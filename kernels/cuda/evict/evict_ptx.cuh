// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// PTX instructions that only eviction uses, as plain functions. Names in Halves operate on two fp16
// numbers that are packed in a register.
namespace crumb::kernels::cuda::ptx {

// Packs two halves, rounded towards zero: magnitudes keep their order against any bound that a half
// can represent.
__device__ __forceinline__ uint32_t PackHalfTowardsZero(float low, float high) {
  uint32_t y;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Returns for each half -1 as a 16-bit integer if |x| >= bound, else 0.
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

__device__ __forceinline__ uint32_t SubtractHalves(uint32_t x, uint32_t y) {
  uint32_t difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(x), "r"(y));
  return difference;
}
__device__ __forceinline__ uint32_t MultiplyHalves(uint32_t x, uint32_t y) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}
__device__ __forceinline__ uint32_t MultiplyAddHalves(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
  return sum;
}
// Returns for each half all ones if |x| <= bound (MagnitudesAtMost) or x > y (HalvesAbove), else
// zero.
__device__ __forceinline__ uint32_t MagnitudesAtMost(uint32_t x, uint32_t bound) {
  uint32_t y;
  asm("{\n .reg .b32 m;\n abs.f16x2 m, %1;\n set.le.u32.f16x2 %0, m, %2;\n}"
      : "=r"(y)
      : "r"(x), "r"(bound));
  return y;
}
__device__ __forceinline__ uint32_t HalvesAbove(uint32_t x, uint32_t y) {
  uint32_t above;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(above) : "r"(x), "r"(y));
  return above;
}
__device__ __forceinline__ uint32_t Select(uint32_t mask, uint32_t one, uint32_t other) {
  return (mask & one) | (~mask & other);
}

// D = C + A B by mma.m16n8k16: fp16 operands, fp32 accumulators.
__device__ __forceinline__ void MmaF16Onto(float (&d)[4], const float (&c)[4],
                                           const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// Returns threadIdx.x % 32. Written as that expression, ptxas 13.0 miscompiled it: it computed (t
// << 3) & 0xf8 in the register of t and went on to use it as t.
__device__ __forceinline__ uint32_t Lane() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ float SquareRoot(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace crumb::kernels::cuda::ptx
