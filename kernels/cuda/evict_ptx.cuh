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

// For each half 1 if x >= bound, else 0.
__device__ __forceinline__ uint32_t HalvesAtLeast(uint32_t x, uint32_t bound) {
  uint32_t y;
  asm("set.ge.f16x2.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(bound));
  return y;
}

__device__ __forceinline__ uint32_t AddHalves(uint32_t x, uint32_t y) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace crumb::kernels::cuda::ptx
