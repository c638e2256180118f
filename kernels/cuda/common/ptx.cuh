// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// PTX instructions that CUDA C++ has no name for, one plain function each. Addresses named `shared`
// or `barrier`, and all uint32_t addresses, are in the shared state space (SharedAddress).
//
// Fragments of an MMA lie as the PTX manual has them: lane 4 r + c holds, of a 16 x 8 accumulator,
// rows r and r + 8 and columns 2 c and 2 c + 1 (element 2 a + e is row r + 8 a, column 2 c + e).
// Comments all over the kernels use r, c, a and e in this sense.
namespace crumb::kernels::cuda::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// D += A B by mma.m16n8k16: fp16 operands, fp32 accumulators.
__device__ __forceinline__ void MmaF16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                       uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MmaF16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1) {
  MmaF16(d, a[0], a[1], a[2], a[3], b0, b1);
}

// D += A B by mma.m16n8k32: A unsigned bytes, B signed bytes, int32 accumulators.
__device__ __forceinline__ void MmaU8S8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                        uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// D += A B by mma.m16n8k16: bf16 operands, fp32 accumulators.
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D += popcount(A and B) by mma.m16n8k256 on single bits.
__device__ __forceinline__ void MmaBits(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Waits for `threads` threads of the block. REQUIRES: all of them name the same `barrier`, 1 to 15.
__device__ __forceinline__ void SyncThreads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits as SyncThreads does and returns whether `any` holds in one of the threads.
__device__ __forceinline__ bool AnyOfThreads(int barrier, int threads, bool any) {
  uint32_t result;
  asm volatile(
      "{\n .reg .pred mine, all;\n setp.ne.u32 mine, %3, 0;\n"
      " bar.red.or.pred all, %1, %2, mine;\n selp.u32 %0, 1, 0, all;\n}"
      : "=r"(result)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(any))
      : "memory");
  return result != 0;
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which each lane holds one register.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l
// / 8.
__device__ __forceinline__ void LoadMatrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint4 LoadShared128(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ uint2 LoadShared64(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void StoreShared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void StoreShared64(uint32_t address, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void StoreShared128(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ float LowHalf(uint32_t x) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(x)));
}
__device__ __forceinline__ float HighHalf(uint32_t x) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(x >> 16)));
}
__device__ __forceinline__ float LowBf16(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float HighBf16(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// Splits two floats into two bf16 pairs whose sum has 16 bits of mantissa.
__device__ __forceinline__ void SplitBf16(float x, float y, uint32_t* high, uint32_t* low) {
  *high = PackBf16(x, y);
  *low = PackBf16(x - LowBf16(*high), y - HighBf16(*high));
}

// Prefetches the cache line of `p` into L2.
__device__ __forceinline__ void PrefetchL2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// --- Ampere: copies of 16 bytes, counted in groups -------------------------------------------

__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void CopyAsync4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- Hopper: bulk copies that complete on an mbarrier in shared memory -------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Stores four 8 x 8 matrices of 16-bit elements, addressed as in LoadMatrices.
__device__ __forceinline__ void StoreMatrices(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders this thread's earlier accesses to shared memory before later bulk copies into it.
__device__ __forceinline__ void FenceCopyEngine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}
// Returns an L2 policy for data that is read once: its lines are evicted first.
__device__ __forceinline__ uint64_t ReadOncePolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Starts a bulk copy of data that is read once. REQUIRES: `bytes` and both addresses are multiples
// of 16.
__device__ __forceinline__ void CopyBulk(uint32_t shared, uint64_t global, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(ReadOncePolicy())
      : "memory");
}
// Starts a bulk copy of data that other blocks read too, under L2's normal policy.
__device__ __forceinline__ void CopyBulkShared(uint32_t shared, uint64_t global, uint32_t bytes,
                                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
// Programmatic dependent launch: LaunchDependents lets the next kernel of the stream start,
// WaitForPrevious waits until the previous kernel has finished and its writes are visible.
__device__ __forceinline__ void LaunchDependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void WaitForPrevious() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
#endif

}  // namespace crumb::kernels::cuda::ptx
