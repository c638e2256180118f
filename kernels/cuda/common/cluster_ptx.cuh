// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Instructions of thread block clusters as plain functions. They need compute capability 9.0. A
// cluster's blocks reach each other's shared memory through mapped addresses; `st.async` stores
// carry their own completion: they count their bytes on an mbarrier of the receiving block, so no
// cluster barrier is needed to read them.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
namespace crumb::kernels::cuda::ptx {

// Returns the address, in the cluster's window, of the same shared memory location in block `rank`.
__device__ __forceinline__ uint32_t MapShared(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// A cluster barrier in two halves. All threads of the cluster call both. The arrival is relaxed:
// after the wait, other blocks are guaranteed to see only barriers that a thread initialised before
// it arrived (FenceBarrierInit). Ordering all other memory would take a microsecond.
__device__ __forceinline__ void ArriveCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes of device memory that are written and read by one access each. A reader therefore sees
// all of a packet or none of it, and no further ordering is needed.
struct Packet {
  uint64_t low, high;
};
__device__ __forceinline__ void StorePacket(Packet* to, const Packet& x) {
  asm volatile(
      "{\n .reg .b128 x;\n mov.b128 x, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], x;\n}" ::"l"(
          to),
      "l"(x.low), "l"(x.high)
      : "memory");
}
__device__ __forceinline__ Packet LoadPacket(const Packet* from) {
  Packet x;
  asm volatile("{\n .reg .b128 x;\n ld.relaxed.gpu.global.b128 x, [%2];\n mov.b128 {%0, %1}, x;\n}"
               : "=l"(x.low), "=l"(x.high)
               : "l"(from)
               : "memory");
  return x;
}
// Adds `x` to a counter in device memory and returns the old value. Orders no other access.
__device__ __forceinline__ int AddRelaxed(int32_t* p, int x) {
  int old;
  asm volatile("atom.add.relaxed.gpu.global.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(x)
               : "memory");
  return old;
}

// Stores to a mapped address. The mapped barrier counts the bytes when they have arrived.
__device__ __forceinline__ void StoreRemote(uint32_t address, float4 x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void StoreRemote(uint32_t address, float x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address),
      "f"(x), "r"(barrier)
      : "memory");
}

// Blocks until the stores of other blocks that `barrier` expects have arrived, and makes them
// visible.
__device__ __forceinline__ void WaitRemote(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

}  // namespace crumb::kernels::cuda::ptx
#endif
