// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Instructions of thread block clusters, Hopper and newer.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
namespace crumb::kernels::cuda::ptx {

// This block's number in its cluster.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t MapShared(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// By all threads of the cluster. Of what a thread wrote before it arrives only the barriers that it
// initialised are seen after the wait (FenceBarrierInit): to order all else takes a microsecond.
__device__ __forceinline__ void ArriveCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes of device memory that are written and read as one, and need no other order.
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
// Adds to a counter of the device, and orders nothing.
__device__ __forceinline__ int AddRelaxed(int32_t* p, int x) {
  int old;
  asm volatile("atom.add.relaxed.gpu.global.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(x)
               : "memory");
  return old;
}

// Stores to mapped addresses; the mapped barrier counts the bytes when they are there.
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

// Waits for what other blocks of the cluster store.
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
