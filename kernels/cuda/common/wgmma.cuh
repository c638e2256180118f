// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Hopper's wgmma as plain functions: MMAs of 64 rows that four warps (a warpgroup) issue together
// and that run asynchronously. They exist in machine code for sm_90a only, not in PTX for newer
// devices.
//
// Order of calls: FenceWgmma before the first wgmma that reads registers the warpgroup has written;
// the wgmmas; CommitWgmma; WaitWgmma or WaitOlderWgmma; TakeWgmmaResults on accumulators before
// they are used. Shared memory written by threads needs FenceCopyEngine and a barrier first.
namespace crumb::kernels::cuda::ptx {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Returns the descriptor of a matrix B in shared memory: its columns lie along rows of 128 bytes in
// the 128-byte swizzle, 8 rows per 1,024 bytes. The descriptor of the next 16 inner channels is
// this plus 2. REQUIRES: the address is 1,024-byte aligned.
__device__ __forceinline__ uint64_t SwizzledMatrix(uint32_t shared) {
  return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{1} << 16) |
         ((shared & 0x3ffff) >> 4);
}
// Returns the descriptor of a matrix B of 64 or 128 columns that is stored transposed: rows are
// inner channels, 64 columns to a row of 128 bytes, the other 64 columns `further` bytes on. The
// descriptor of the next 16 inner channels is this plus 128.
__device__ __forceinline__ uint64_t TransposedMatrix(uint32_t shared, uint32_t further) {
  return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{further / 16} << 16) |
         ((shared & 0x3ffff) >> 4);
}
// Returns the descriptor of a matrix B of 16 inner channels, without swizzle: columns of 16 bytes
// side by side hold the first 8 channels, and the other 8 are read from the same place.
__device__ __forceinline__ uint64_t NarrowMatrix(uint32_t shared) {
  return (uint64_t{8} << 32) | ((shared & 0x3ffff) >> 4);
}
// Returns the descriptor of a matrix A or B of 16 inner channels, without swizzle: 8 rows of 16
// bytes hold the first 8 channels, the next 8 rows of 16 bytes the others, 256 bytes per 8 rows.
__device__ __forceinline__ uint64_t PlainMatrix(uint32_t shared) {
  return (uint64_t{16} << 32) | (uint64_t{8} << 16) | ((shared & 0x3ffff) >> 4);
}
__device__ __forceinline__ void FenceWgmma() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void CommitWgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitWgmma() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Waits until at most the kPending newest groups of wgmmas are unfinished.
template <int kPending>
__device__ __forceinline__ void WaitOlderWgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The names of operands in the assembly of a wgmma with 8 `tiles` columns: accumulators, A in
// registers and B behind it, A and B in shared memory, and whether to accumulate.
#define CRUMB_WGMMA_D_1 "%0, %1, %2, %3"
#define CRUMB_WGMMA_A_1 "{%4, %5, %6, %7}, %8"
#define CRUMB_WGMMA_A_ACCUMULATE_1 "%9"
#define CRUMB_WGMMA_D_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CRUMB_WGMMA_SHARED_4 "%16, %17"
#define CRUMB_WGMMA_SHARED_ACCUMULATE_4 "%18"
#define CRUMB_WGMMA_D_8                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CRUMB_WGMMA_A_8 "{%32, %33, %34, %35}, %36"
#define CRUMB_WGMMA_A_ACCUMULATE_8 "%37"
#define CRUMB_WGMMA_SHARED_8 "%32, %33"
#define CRUMB_WGMMA_SHARED_ACCUMULATE_8 "%34"
#define CRUMB_WGMMA_D_16                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CRUMB_WGMMA_A_16 "{%64, %65, %66, %67}, %68"
#define CRUMB_WGMMA_A_ACCUMULATE_16 "%69"
#define CRUMB_WGMMA_SHARED_16 "%64, %65"
#define CRUMB_WGMMA_SHARED_ACCUMULATE_16 "%66"
#define CRUMB_WGMMA_TILE(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define CRUMB_WGMMA_TILES(d, n)                                                   \
  CRUMB_WGMMA_TILE(d, n), CRUMB_WGMMA_TILE(d, n + 1), CRUMB_WGMMA_TILE(d, n + 2), \
      CRUMB_WGMMA_TILE(d, n + 3)
#define CRUMB_WGMMA_TILES_1(d) CRUMB_WGMMA_TILE(d, 0)
#define CRUMB_WGMMA_TILES_4(d) CRUMB_WGMMA_TILES(d, 0)
#define CRUMB_WGMMA_TILES_8(d) CRUMB_WGMMA_TILES(d, 0), CRUMB_WGMMA_TILES(d, 4)
#define CRUMB_WGMMA_TILES_16(d) \
  CRUMB_WGMMA_TILES_8(d), CRUMB_WGMMA_TILES(d, 8), CRUMB_WGMMA_TILES(d, 12)

// D = A B + (accumulate ? D : 0) of 64 x 8 kTiles x 16, accumulators in fp32. A is in registers,
// 16 rows per warp. B of the transposed one has the descriptor TransposedMatrix.
template <int kTiles>
__device__ void WgmmaBf16(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b,
                          bool accumulate = true);
template <int kTiles>
__device__ void WgmmaBf16Transposed(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b,
                                    bool accumulate = true);
template <int kTiles>
__device__ void WgmmaF16(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b,
                         bool accumulate = true);

#define CRUMB_WGMMA(name, tiles, columns, type, transposed)                                       \
  template <>                                                                                     \
  __device__ __forceinline__ void name<tiles>(float(&d)[tiles][4], const uint32_t(&a)[4],         \
                                              uint64_t b, bool accumulate) {                      \
    asm volatile(                                                                                 \
        "{\n .reg .pred p;\n setp.ne.b32 p, " CRUMB_WGMMA_A_ACCUMULATE_##tiles                    \
        ", 0;\n wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type            \
        " {" CRUMB_WGMMA_D_##tiles "}, " CRUMB_WGMMA_A_##tiles ", p, 1, 1, " #transposed ";\n}"   \
        : CRUMB_WGMMA_TILES_##tiles(d)                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))); \
  }
CRUMB_WGMMA(WgmmaBf16, 8, 64, bf16, 0)
CRUMB_WGMMA(WgmmaBf16, 16, 128, bf16, 0)
CRUMB_WGMMA(WgmmaBf16Transposed, 8, 64, bf16, 1)
CRUMB_WGMMA(WgmmaBf16Transposed, 16, 128, bf16, 1)
CRUMB_WGMMA(WgmmaF16, 1, 8, f16, 0)
CRUMB_WGMMA(WgmmaF16, 8, 64, f16, 0)
CRUMB_WGMMA(WgmmaF16, 16, 128, f16, 0)

// These wgmmas have A in shared memory, laid out as B with 64 rows.
template <int kTiles>
__device__ void WgmmaBf16Shared(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate);
template <int kTiles>
__device__ void WgmmaF16Shared(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate);

#define CRUMB_WGMMA_SHARED(name, tiles, columns, type)                                             \
  template <>                                                                                      \
  __device__ __forceinline__ void name<tiles>(float(&d)[tiles][4], uint64_t a, uint64_t b,         \
                                              bool accumulate) {                                   \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " CRUMB_WGMMA_SHARED_ACCUMULATE_##tiles       \
                 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type    \
                 " {" CRUMB_WGMMA_D_##tiles "}, " CRUMB_WGMMA_SHARED_##tiles ", p, 1, 1, 0, 0;\n}" \
                 : CRUMB_WGMMA_TILES_##tiles(d)                                                    \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                             \
  }
CRUMB_WGMMA_SHARED(WgmmaBf16Shared, 4, 32, bf16)
CRUMB_WGMMA_SHARED(WgmmaBf16Shared, 8, 64, bf16)
CRUMB_WGMMA_SHARED(WgmmaBf16Shared, 16, 128, bf16)
CRUMB_WGMMA_SHARED(WgmmaF16Shared, 8, 64, f16)
CRUMB_WGMMA_SHARED(WgmmaF16Shared, 16, 128, f16)

// Marks accumulators as written here, so that the compiler moves no use of them before the wait.
template <int kTiles>
__device__ __forceinline__ void TakeWgmmaResults(float (&d)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
  }
}

// Moves registers between warpgroups: every warp of a warpgroup reduces, or raises, its threads'
// registers to kRegisters (24 to 256 in steps of 8). AcquireRegisters waits until they are free.
template <int kRegisters>
__device__ __forceinline__ void ReleaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void AcquireRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif

}  // namespace crumb::kernels::cuda::ptx
