// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx.cuh"

// Instructions that only decode attention uses.
namespace crumb::kernels::cuda::ptx {

// D += A B of 16 x 8 x 16 with fp16 operands.
__device__ __forceinline__ void MmaF16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1) {
  MmaF16(d, a[0], a[1], a[2], a[3], b0, b1);
}

// Two floats as the sum of two fp16 pairs.
__device__ __forceinline__ void SplitHalf(float x, float y, uint32_t* high, uint32_t* low) {
  *high = PackHalf(x, y);
  *low = PackHalf(x - LowHalf(*high), y - HighHalf(*high));
}

// Adds to a counter of the device; orders what the block wrote before a barrier ahead of it, and
// what others wrote before theirs ahead of what follows.
__device__ __forceinline__ int AddReleaseAcquire(int32_t* p, int x) {
  int old;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(x)
               : "memory");
  return old;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Arrives when this thread's copies of 16 bytes have.
__device__ __forceinline__ void ArriveWithCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}
#endif

}  // namespace crumb::kernels::cuda::ptx
