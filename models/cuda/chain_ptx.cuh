// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"

// Instructions that only chains of products use.
namespace crumb::models::cuda::ptx {

using namespace kernels::cuda::ptx;  // NOLINT: one name for all instructions

// As SyncThreads, for threads that do not wait.
__device__ __forceinline__ void ArriveThreads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// What other blocks wrote before they added to `p` is seen after it.
__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// The multiprocessor's clock.
__device__ __forceinline__ uint32_t Cycles() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// WaitBarrier that may give up: whether the phase of this parity is over.
__device__ __forceinline__ bool TryWaitBarrier(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// Adds to a counter of the device; orders what the block wrote before a barrier ahead of it.
__device__ __forceinline__ uint32_t AddReleaseAcquire(uint32_t* p, uint32_t x) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(x)
               : "memory");
  return old;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// True for one lane of a warp that is whole. As the compiler knows that, what this lane asks of the
// copy engine takes one instruction; behind any other condition it is a loop over lanes.
__device__ __forceinline__ bool Elect() {
  uint32_t chosen;
  asm volatile(
      "{\n .reg .pred p;\n"
      " elect.sync _|p, 0xffffffff;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(chosen));
  return chosen != 0;
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
#endif

}  // namespace crumb::models::cuda::ptx
