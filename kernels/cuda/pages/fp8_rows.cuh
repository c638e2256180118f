// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"

// Elements of FP8 rows (e4m3 times a factor of their layer) and the BF16 values that stand for
// them.
namespace crumb::kernels::cuda {

// Converts two elements to BF16. codes: the elements in the low 16 bits.
__device__ __forceinline__ uint32_t Bf16OfFp8Pair(uint32_t codes, float scale) {
  const __half2_raw x =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  const uint32_t bits = static_cast<uint32_t>(x.x) | static_cast<uint32_t>(x.y) << 16;
  return ptx::PackBf16(ptx::LowHalf(bits) * scale, ptx::HighHalf(bits) * scale);
}

// The inverse: rounds to the nearest elements, limited to the largest.
__device__ __forceinline__ uint32_t Fp8PairOfBf16(uint32_t pair, float scale) {
  const float2 x =
      make_float2(__uint_as_float(pair << 16) / scale, __uint_as_float(pair & 0xffff0000u) / scale);
  return __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
}

// Converts eight elements to BF16.
__device__ __forceinline__ uint4 Bf16Elements(uint2 codes, float scale) {
  return make_uint4(Bf16OfFp8Pair(codes.x & 0xffff, scale), Bf16OfFp8Pair(codes.x >> 16, scale),
                    Bf16OfFp8Pair(codes.y & 0xffff, scale), Bf16OfFp8Pair(codes.y >> 16, scale));
}

// The inverse.
__device__ __forceinline__ uint2 Fp8Elements(uint4 x, float scale) {
  return make_uint2(Fp8PairOfBf16(x.x, scale) | Fp8PairOfBf16(x.y, scale) << 16,
                    Fp8PairOfBf16(x.z, scale) | Fp8PairOfBf16(x.w, scale) << 16);
}

}  // namespace crumb::kernels::cuda
