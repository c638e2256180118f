// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/prefill/warpgroup.cuh"

// The producers of the wgmma path over INT2 page tiles: eight warps copy tiles to shared memory and
// unpack them into wgmma operands, four warps K and four V, once for the 128 query rows of a block.
//
// K and V pass through two rings each: StoredTiles holds tiles as they are stored, WgmmaShared the
// unpacked ones. A producer waits for a stored tile, waits until consumers have freed the buffer
// that it unpacks to, unpacks, arrives on the buffer's full barrier and refills the tile's slot.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class T>
__device__ __forceinline__ int PageSteps(const Block<T>& block) {
  constexpr int kStepTiles = WarpgroupTraits<T>::kStepTiles;
  return (block.pages + kStepTiles - 1) / kStepTiles;
}

// Returns the values of two tokens: the codes at `mask` of a word, times scale, plus minimum.
__device__ __forceinline__ uint32_t Value(uint32_t word, uint32_t mask, uint32_t scale,
                                          uint32_t minimum) {
  const uint32_t code = word & mask;
  const __half2 value =
      __hfma2(reinterpret_cast<const __half2&>(code), reinterpret_cast<const __half2&>(scale),
              reinterpret_cast<const __half2&>(minimum));
  return reinterpret_cast<const uint32_t&>(value);
}

// Ring of the K or V halves of tiles as they are stored. The four producer warps of K, or of V,
// share it; each reads 16 tokens of a tile.
template <class T>
class StoredTiles {
  using U = WarpgroupTraits<T>;

 public:
  __device__ __forceinline__ StoredTiles(const PrefillAttentionParams& p, const Block<T>& block,
                                         bool value, WgmmaShared<T>& shared,
                                         WgmmaBarriers<T>& barriers)
      : p_(p),
        block_(block),
        offset_(value ? T::kCodeBytes : 0),
        meta_offset_(2 * T::kCodeBytes + (value ? T::kMetaBytes : 0)),
        slots_(ptx::SharedAddress(shared.tiles[value][0].codes)),
        barriers_(ptx::SharedAddress(barriers.tile[value])) {
    for (int i = 0; i < U::kSlots; ++i) Fill();
  }

  // Starts copying the next tile, into the slot of the tile kSlots before it. Only the first warp
  // copies.
  __device__ __forceinline__ void Fill() {
    if (threadIdx.x % T::kThreads >= 32 || next_ >= block_.pages) return;
    const int lane = static_cast<int>(threadIdx.x) % 32, index = next_ % 32;
    const uint32_t slot = next_ % U::kSlots;
    if (index == 0 && next_ + lane < block_.pages) {
      address_ = p_.page_address[static_cast<int64_t>(block_.sequence) * p_.shape.max_pages +
                                 next_ + lane] +
                 p_.page_layer_offset + block_.head * p_.page_head_stride;
    }
    const uint64_t from = __shfl_sync(~0u, address_, index);
    if (lane == 0) {
      const uint32_t barrier = barriers_ + 8 * slot, to = slots_ + slot * kSlotBytes;
      ptx::ArriveExpecting(barrier, kSlotBytes);
      ptx::CopyBulkShared(to, from + offset_, T::kCodeBytes, barrier);
      ptx::CopyBulkShared(to + T::kCodeBytes, from + meta_offset_, T::kMetaBytes, barrier);
    }
    ++next_;
  }

  // Waits for a page's half tile and returns the address of its codes, which scales and minima
  // follow. A page after the last one, in the last step, is the last one again.
  __device__ __forceinline__ uint32_t Tile(int page) const {
    page = min(page, block_.pages - 1);
    ptx::WaitBarrier(barriers_ + 8 * (page % U::kSlots), page / U::kSlots % 2);
    return slots_ + page % U::kSlots * kSlotBytes;
  }

  // Waits until all four warps have read a step's slots and refills them.
  __device__ __forceinline__ void Release(int barrier) {
    ptx::SyncThreads(barrier, T::kThreads);
#pragma unroll
    for (int i = 0; i < U::kStepTiles; ++i) Fill();
  }

 private:
  static constexpr uint32_t kSlotBytes = sizeof(StoredTile<T>);

  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  const uint32_t offset_, meta_offset_;
  const uint32_t slots_, barriers_;
  int next_ = 0;
  uint64_t address_ = 0;
};

// Unpacks keys. They stay masked codes, times a power of two that is divided out of q'.
template <class T>
__device__ __forceinline__ void UnpackKeys(const Block<T>& block, StoredTiles<T>& tiles,
                                           WgmmaShared<T>& shared, WgmmaBarriers<T>& barriers) {
  using U = WarpgroupTraits<T>;
  const int warp = static_cast<int>(threadIdx.x) / 32 % T::kWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float most = 0.0f;
#pragma unroll
  for (const float other : shared.most) most = fmaxf(most, other);
  const float factor = PowerOfTwo(24 - QueryExponent(most));
  // Pieces l / 8 and 4 + l / 8 of line l % 8.
  const uint32_t line = ptx::SharedAddress(shared.keys[0].codes[0][16 * warp + lane % 8]);
  const uint32_t to[2] = {line + ((lane / 8) ^ (lane % 8)) * 16,
                          line + ((4 + lane / 8) ^ (lane % 8)) * 16};
  const int steps = PageSteps(block);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const uint32_t buffer = step % U::kBuffers;
    uint4 codes[U::kStepTiles];
    uint32_t meta[U::kStepTiles][T::kGroups][2];
#pragma unroll
    for (int t = 0; t < U::kStepTiles; ++t) {
      const uint32_t tile = tiles.Tile(step * U::kStepTiles + t);
      codes[t] = ptx::LoadShared128(tile + 4 * T::kDim * warp + 16 * lane);
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // Metadata of tokens 2 l and 2 l + 1 of the warp's 16 tokens, for lanes l < 8.
          const uint2 words = ptx::LoadShared64(tile + T::kCodeBytes + 4 * T::kTokens * y +
                                                64 * (lane % 4) + 32 * e + 8 * warp);
          meta[t][y][e] = lane < 4 ? words.x : words.y;
        }
      }
    }
    if (step >= U::kBuffers) WaitStep(barriers.keys_free, step - U::kBuffers);
#pragma unroll
    for (int t = 0; t < U::kStepTiles; ++t) {
      const uint32_t w[4] = {codes[t].x, codes[t].y, codes[t].z, codes[t].w};
      const uint32_t at = buffer * sizeof(UnpackedKeys<T>) + T::kTokens * t * U::kLineBytes;
#pragma unroll
      for (int q = 0; q < 2; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t x[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) x[k] = CodePair(w[i], 4 * q + k);
          ptx::StoreMatrices(to[q] + at + (i / 2 * U::kStepTokens + i % 2 * 8) * U::kLineBytes, x);
        }
      }
      if (lane < 8) {
#pragma unroll
        for (int y = 0; y < T::kGroups; ++y) {
          const uint32_t(&m)[2] = meta[t][y];
          shared.key_meta[buffer][y][T::kTokens / 2 * t + 8 * warp + lane] =
              make_float4(ptx::LowHalf(m[0]) * factor, ptx::LowHalf(m[1]) * factor,
                          ptx::HighHalf(m[0]), ptx::HighHalf(m[1]));
        }
      }
    }
    ptx::FenceCopyEngine();
    ArriveStep(barriers.keys, step);
    tiles.Release(5);
  }
}

// Unpacks values to code * scale + minimum, divided by a power of two whose exponent only grows.
template <class T>
class ValueUnpacker {
  using U = WarpgroupTraits<T>;

 public:
  __device__ __forceinline__ ValueUnpacker(const Block<T>& block, StoredTiles<T>& tiles,
                                           WgmmaShared<T>& shared, WgmmaBarriers<T>& barriers)
      : block_(block),
        tiles_(tiles),
        shared_(shared),
        barriers_(barriers),
        warp_(static_cast<int>(threadIdx.x) / 32 % T::kWarps),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    // Pieces 2 warp and 2 warp + 1 of line l.
    const uint32_t line = ptx::SharedAddress(shared.values[0].values[0][lane_]);
    to_[0] = line + ((2 * warp_) ^ (lane_ % 8)) * 16;
    to_[1] = line + ((2 * warp_ + 1) ^ (lane_ % 8)) * 16;
  }

  __device__ __forceinline__ void Run() {
    const int steps = PageSteps(block_);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const uint32_t buffer = step % U::kBuffers;
      uint32_t tile[U::kStepTiles];
#pragma unroll
      for (int t = 0; t < U::kStepTiles; ++t) tile[t] = tiles_.Tile(step * U::kStepTiles + t);
      FollowExponent(tile);
      if (step >= U::kBuffers) WaitStep(barriers_.values_free, step - U::kBuffers);
      if (threadIdx.x % T::kThreads == 0) shared_.value_exponent[buffer] = exponent_;
#pragma unroll
      for (int t = 0; t < U::kStepTiles; ++t) {
        Unpack(tile[t], buffer * sizeof(UnpackedValues<T>) + t * T::kDim * U::kLineBytes);
      }
      ptx::FenceCopyEngine();
      ArriveStep(barriers_.values, step);
      tiles_.Release(6);
    }
  }

 private:
  // Raises the exponent to that of the step's largest scale and minimum.
  __device__ __forceinline__ void FollowExponent(const uint32_t (&tile)[U::kStepTiles]) {
    uint32_t scale = 0, minimum = 0;
#pragma unroll
    for (int t = 0; t < U::kStepTiles; ++t) {
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
        const uint2 words =
            ptx::LoadShared64(tile[t] + T::kCodeBytes + 4 * T::kTokens * y + 8 * lane_);
        scale = max(scale, max(words.x & 0x7fff, words.y & 0x7fff));
        minimum = max(minimum, max(words.x & 0x7fff0000, words.y & 0x7fff0000));
      }
    }
    // Each is below 2^(x / 2^10 - 14); sums stay within fp16's range.
    const int least = static_cast<int>(max(__reduce_max_sync(~0u, scale) / 1024 + 16,
                                           (__reduce_max_sync(~0u, minimum) >> 16) / 1024)) -
                      28;
    exponent_ = max(exponent_, least);
  }

  __device__ __forceinline__ void Unpack(uint32_t tile, uint32_t at) const {
    const uint4 codes = ptx::LoadShared128(tile + 4 * T::kDim * warp_ + 16 * lane_);
    // Scale and minimum of tokens 8 b + 2 c + e of the warp's 16.
    uint2 word[T::kGroups][2];
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        word[y][e] = ptx::LoadShared64(tile + T::kCodeBytes + 4 * T::kTokens * y +
                                       64 * (lane_ % 4) + 32 * e + 8 * warp_);
      }
    }
    const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
    const float unit = PowerOfTwo(-exponent_);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
        const uint32_t even = b == 0 ? word[y][0].x : word[y][0].y;
        const uint32_t odd = b == 0 ? word[y][1].x : word[y][1].y;
        const float s0 = ptx::LowHalf(even) * unit, s1 = ptx::LowHalf(odd) * unit;
        // Scales for codes at bit 6 and at bit 8.
        const uint32_t low = ptx::PackHalf(s0 * 0x1p18f, s1 * 0x1p18f);
        const uint32_t high = ptx::PackHalf(s0 * 0x1p16f, s1 * 0x1p16f);
        const uint32_t minimum =
            ptx::PackHalf(ptx::HighHalf(even) * unit, ptx::HighHalf(odd) * unit);
#pragma unroll
        for (int m = y; m < 2; m += T::kGroups) {
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            uint32_t x[4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              // The rotation brings pairs 4 q + 2 k and 4 q + 2 k + 1 to bits 6 and 8.
              const uint32_t rotation = (38 - 4 * (2 * q + k)) % 32;
              const uint32_t rotated = __funnelshift_l(w[2 * m + b], w[2 * m + b], rotation);
              x[2 * k] = Value(rotated, 0x00c000c0u, low, minimum);
              x[2 * k + 1] = Value(rotated, 0x03000300u, high, minimum);
            }
            ptx::StoreMatrices(to_[b] + at + (64 * m + 32 * q) * U::kLineBytes, x);
          }
        }
      }
    }
  }

  const Block<T>& block_;
  StoredTiles<T>& tiles_;
  WgmmaShared<T>& shared_;
  WgmmaBarriers<T>& barriers_;
  const int warp_, lane_;
  uint32_t to_[2];
  int exponent_ = INT_MIN;
};

// Producer warps over pages: four bring K, four V.
template <class T>
__device__ __forceinline__ void ProducePages(const PrefillAttentionParams& p, const Block<T>& block,
                                             bool value, WgmmaShared<T>& shared,
                                             WgmmaBarriers<T>& barriers) {
  StoredTiles<T> tiles(p, block, value, shared, barriers);
  // After this wait the memory that tiles are unpacked to is free and the query's exponent is
  // known.
  WaitForConsumers<T>(value);
  if (value) {
    ValueUnpacker<T>(block, tiles, shared, barriers).Run();
  } else {
    UnpackKeys<T>(block, tiles, shared, barriers);
  }
}

#endif

}  // namespace crumb::kernels::cuda::prefill
