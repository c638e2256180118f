// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"

// PTX instructions that only attention kernels use, as plain functions.
namespace crumb::kernels::cuda::ptx {

// Returns log2(x) with an error of at most 2^-22.
__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Adds `x` to a counter in device memory and returns the old value. The block's writes before a
// barrier are ordered ahead of the addition, and other blocks' writes before their additions ahead
// of later reads.
__device__ __forceinline__ int AddReleaseAcquire(int32_t* p, int x) {
  int old;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(x)
               : "memory");
  return old;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Arrives at `barrier` when this thread's earlier 16-byte cp.async copies have completed.
__device__ __forceinline__ void ArriveWithCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}
#endif

}  // namespace crumb::kernels::cuda::ptx
