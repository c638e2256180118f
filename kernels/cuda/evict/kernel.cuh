// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/evict/window_evictor.cuh"

// The evict kernel (docs/kernels/evict.md): WindowEvictor is the schedule of a block; this file
// adds how a quantized window is stored, and the kernel's entry.
namespace crumb::kernels::cuda {

template <class T, bool kFeedback, RotateMma kMma>
__device__ __forceinline__ void WindowEvictor<T, kFeedback, kMma>::Finish(int window,
                                                                          uint32_t status,
                                                                          Result* result) {
  result->window = window;
  if (p_.status != nullptr && status != 0) atomicOr(p_.status + window, status);
  if (IsValue()) {
    // V's words hold tokens along the columns of the lanes: each 16-bit half of a K word moves as
    // one.
#pragma unroll
    for (uint32_t& word : result->words) word = ptx::TransposeMatrix(word);
  }
  if (p_.checksums != nullptr) AddToChecksum(*result);
}

template <class T, bool kFeedback, RotateMma kMma>
__device__ __forceinline__ void WindowEvictor<T, kFeedback, kMma>::Store(const Result& result) {
  constexpr int kCodeBytes = kWindowTokens * T::kDim / 4;
  constexpr int kMetaBytes = kWindowTokens * T::kGroups * 4;
  constexpr int kWide = T::kDim % 128 == 0 ? 4 : 2;  // code words of a lane that lie side by side
  const int lane = threadIdx.x % 32;
  const auto& words = result.words;
  char* tile = reinterpret_cast<char*>(p_.tile_address[result.window] + Facts().tile_offset);
  char* codes = tile + (IsValue() ? kCodeBytes : 0) + 4 * T::kDim * Group() + 4 * kWide * lane;
#pragma unroll
  for (int i = 0; i < T::kTiles / 4; i += kWide) {
    if constexpr (kWide == 4) {
      *reinterpret_cast<uint4*>(codes + 128 * i) =
          make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    } else {
      *reinterpret_cast<uint2*>(codes + 128 * i) = make_uint2(words[i], words[i + 1]);
    }
  }
  if (lane % 4 < 2) {
    char* meta = tile + 2 * kCodeBytes + (IsValue() ? kMetaBytes : 0) +
                 kWindowTokens / 2 * (lane / 4) + 8 * Group() + 4 * (lane % 2);
#pragma unroll
    for (int g = 0; g < T::kGroups; ++g) {
      *reinterpret_cast<uint32_t*>(meta + 4 * kWindowTokens * g) = result.meta[g];
    }
  }
}

template <class T, bool kFeedback, RotateMma kMma>
__device__ __forceinline__ void WindowEvictor<T, kFeedback, kMma>::AddToChecksum(
    const Result& result) {
  const uint32_t part = Checksums().PartOf(Group(), result.words, result.meta);
  if (threadIdx.x % 32 != 0) return;
  const int64_t tile = static_cast<int64_t>(result.window) * p_.layers * p_.kv_heads + matrix_ / 2;
  auto* word = static_cast<unsigned long long*>(p_.workspace) + tile;
  const uint64_t mine = uint64_t{1} << (32 + kWarpgroupWarps * IsValue() + Group()) | part;
  const uint64_t now = atomicXor(word, mine) ^ mine;
  if (now >> 32 != (1u << 2 * kWarpgroupWarps) - 1) return;
  p_.checksums[tile] = static_cast<uint32_t>(now) ^ k_.zeros_checksum;
  *word = 0;
}

template <class T, bool kFeedback, RotateMma kMma>
__global__ void __launch_bounds__(EvictLayout<T, kFeedback>::kThreads, 1)
    EvictKernel(const __grid_constant__ EvictKernelParams k) {
  extern __shared__ __align__(1024) char shared[];
  if (k.p.rarely_any && *k.p.windows <= 0) return;
  WindowEvictor<T, kFeedback, kMma>(k, shared).Run();
}

}  // namespace crumb::kernels::cuda
