// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/prefill/warpgroup.cuh"
#include "kernels/cuda/prefill/warpgroup_tiles.cuh"

// The producers of the wgmma path over INT2 page tiles: eight warps unpack stored tiles into wgmma
// operands, four warps K and four V, once for the 128 query rows of a block.
//
// A producer warp waits for the stored tiles of a step (warpgroup_tiles.cuh), waits until consumers
// have freed the buffer that it unpacks to, unpacks, releases the tiles and arrives on the buffer's
// full barrier.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Loads a lane's code words of 16 tokens, `from` their first byte.
template <int kWords>
__device__ __forceinline__ void LoadCodeWords(uint32_t from, int lane, uint32_t (&w)[kWords]) {
  if constexpr (kWords == 2) {
    const uint2 words = ptx::LoadShared64(from + 8 * lane);
    w[0] = words.x;
    w[1] = words.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 words = ptx::LoadShared128(from + 128 * i + 16 * lane);
      w[i] = words.x;
      w[i + 1] = words.y;
      w[i + 2] = words.z;
      w[i + 3] = words.w;
    }
  }
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

// The largest scale and the largest magnitude of a minimum, as bits of fp16 numbers.
struct MetaRange {
  uint32_t scale = 0, minimum = 0;

  __device__ __forceinline__ void Add(uint32_t meta) {
    scale = max(scale, meta & 0x7fff);
    minimum = max(minimum, meta & 0x7fff0000);
  }
  // Returns the exponent that brings the scales of all lanes below 2^-2 and their minima below
  // 2^14, so that values and sums stay within fp16's range.
  __device__ __forceinline__ int Exponent() const {
    // Each is below 2^(x / 2^10 - 14).
    return static_cast<int>(max(__reduce_max_sync(~0u, scale) / 1024 + 16,
                                (__reduce_max_sync(~0u, minimum) >> 16) / 1024)) -
           28;
  }
};

// Sets x to the values of the pairs 4 q .. 4 q + 3 of a word: code * scale + minimum, where `low`
// and `high` are the scale times 2^18 and 2^16, for codes at bits 6 and 8.
__device__ __forceinline__ void UnpackPairs(uint32_t word, int q, uint32_t low, uint32_t high,
                                            uint32_t minimum, uint32_t (&x)[4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    // The rotation brings pairs 4 q + 2 k and 4 q + 2 k + 1 to bits 6 and 8.
    const uint32_t rotation = (38 - 4 * (2 * q + k)) % 32;
    const uint32_t rotated = __funnelshift_l(word, word, rotation);
    x[2 * k] = Value(rotated, 0x00c000c0u, low, minimum);
    x[2 * k + 1] = Value(rotated, 0x03000300u, high, minimum);
  }
}

// Unpacks keys to fp16, for BF16 outputs: (code - 1) * scale, divided by a power of two that the
// warp's tokens of a step share; fp16 holds it exactly. The rest of a key, minimum + scale in every
// channel of a group, makes up 16 further channels (kConstantBytes), whose query holds the sum of
// q' over the group.
template <class T>
class KeyUnpacker {
  using U = WarpgroupTraits<T>;
  static constexpr int kMetaOffset = 2 * T::kCodeBytes, kPieces = T::kDim / 32;

 public:
  __device__ __forceinline__ KeyUnpacker(const Block<T>& block, WgmmaShared<T>& shared,
                                         WgmmaBarriers<T>& barriers)
      : steps_(PageSteps(block)),
        tiles_(block, shared, barriers),
        shared_(shared),
        barriers_(barriers),
        warp_(static_cast<int>(threadIdx.x) / 32 % T::kWarps),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    // Pieces l / 8 and 4 + l / 8 of line l % 8.
    const uint32_t line = ptx::SharedAddress(shared.keys[0].codes[0][16 * warp_ + lane_ % 8]);
    to_[0] = line + ((lane_ / 8) ^ (lane_ % 8)) * 16;
    to_[1] = line + ((4 + lane_ / 8) ^ (lane_ % 8)) * 16;
    const int r = lane_ / 4;
    meta_ = kMetaOffset + 64 * (r / 2) + 32 * (r % 2) + 8 * warp_;
    constants_ = ptx::SharedAddress(shared.keys[0].constants) + 16 * warp_ * kConstantBytes +
                 16 * r + ConstantsOffset(lane_ % 4);
  }

  __device__ __forceinline__ void Run() {
    float most = 0.0f;
#pragma unroll
    for (const float other : shared_.most) most = fmaxf(most, other);
    const int query_exponent = QueryExponent(most);
    ClearConstants();
#pragma unroll 1
    for (uint32_t step = 0; step < steps_; ++step) {
      const uint32_t buffer = step % U::kBuffers;
      uint32_t tile[U::kStepTiles];
      tiles_.Wait(tile);
      uint2 meta[U::kStepTiles][T::kGroups];  // metadata of tokens r and r + 8
      uint32_t codes[U::kStepTiles][T::kWords];
      MetaRange range;
#pragma unroll
      for (int t = 0; t < U::kStepTiles; ++t) {
#pragma unroll
        for (int y = 0; y < T::kGroups; ++y) {
          meta[t][y] = ptx::LoadShared64(tile[t] + meta_ + 4 * T::kTokens * y);
          range.Add(meta[t][y].x);
          range.Add(meta[t][y].y);
        }
        LoadCodeWords(tile[t] + 4 * T::kDim * warp_, lane_, codes[t]);
      }
      tiles_.Release();
      const int exponent = range.Exponent();
      if (step >= U::kBuffers) WaitStep(barriers_.keys_free, step - U::kBuffers);
      if (lane_ == 0) {
        reinterpret_cast<float*>(&shared_.key_factor[buffer])[warp_] =
            PowerOfTwo(exponent - query_exponent);
      }
#pragma unroll
      for (int t = 0; t < U::kStepTiles; ++t) {
        Unpack(codes[t], meta[t], PowerOfTwo(-exponent), buffer, t);
      }
      ptx::FenceCopyEngine();
      ArriveStep(barriers_.keys, step);
    }
  }

 private:
  // Clears the constants of all buffers, as their groups need not fill 16 channels.
  __device__ __forceinline__ void ClearConstants() const {
    constexpr int kPieces = U::kStepTokens * kConstantBytes / 16;
    for (int buffer = 0; buffer < U::kBuffers; ++buffer) {
      const uint32_t to = ptx::SharedAddress(shared_.keys[buffer].constants);
      for (int i = static_cast<int>(threadIdx.x) % T::kThreads; i < kPieces; i += T::kThreads) {
        ptx::StoreShared128(to + 16 * i, make_uint4(0, 0, 0, 0));
      }
    }
    ptx::SyncThreads(5, T::kThreads);
  }

  // Unpacks the warp's 16 tokens of the step's tile t. The lane's rows are tokens r and r + 8.
  __device__ __forceinline__ void Unpack(const uint32_t (&w)[T::kWords],
                                         const uint2 (&meta)[T::kGroups], float unit,
                                         uint32_t buffer, int t) const {
    const uint32_t step = buffer * static_cast<uint32_t>(sizeof(UnpackedKeys<T>));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t low = 0, high = 0, minimum = 0;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {  // 32 channels
        const int y = piece * T::kGroups / kPieces;
        if (piece * T::kGroups % kPieces == 0) {
          const uint32_t own = h == 0 ? meta[y].x : meta[y].y;
          const float scale = ptx::LowHalf(own) * unit;
          low = ptx::PackHalf(scale * 0x1p18f, scale * 0x1p18f);
          high = ptx::PackHalf(scale * 0x1p16f, scale * 0x1p16f);
          minimum = ptx::PackHalf(-scale, -scale);
          const float constant = fmaf(ptx::HighHalf(own), unit, scale);
          const uint32_t first = ptx::PackHalf(constant, constant);
          const uint32_t rest = ptx::PackHalf(constant - ptx::LowHalf(first), 0.0f);
          if (lane_ % 4 == y) {
            ptx::StoreShared64(constants_ + step + (T::kTokens * t + 8 * h) * kConstantBytes,
                               make_uint2(first, rest));
          }
        }
        uint32_t x[4];
        UnpackPairs(w[2 * (piece / 2) + h], piece % 2, low, high, minimum, x);
        ptx::StoreMatrices(
            to_[piece % 2] + step +
                (T::kTokens * t + piece / 2 * U::kStepTokens + h * 8) * U::kLineBytes,
            x);
      }
    }
  }

  const uint32_t steps_;
  TileReader<T> tiles_;
  WgmmaShared<T>& shared_;
  WgmmaBarriers<T>& barriers_;
  const int warp_, lane_;
  uint32_t to_[2], meta_, constants_;
};

// Unpacks keys for fp32 outputs. They stay masked codes, times a power of two that is divided out
// of q'; scores are scaled by the consumers.
template <class T>
__device__ __forceinline__ void UnpackKeyCodes(const Block<T>& block, WgmmaShared<T>& shared,
                                               WgmmaBarriers<T>& barriers) {
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
  TileReader<T> tiles(block, shared, barriers);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const uint32_t buffer = step % U::kBuffers;
    uint32_t tile[U::kStepTiles];
    tiles.Wait(tile);
    uint32_t codes[U::kStepTiles][T::kWords];
    uint32_t meta[U::kStepTiles][T::kGroups][2];
#pragma unroll
    for (int t = 0; t < U::kStepTiles; ++t) {
      LoadCodeWords(tile[t] + 4 * T::kDim * warp, lane, codes[t]);
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // Metadata of tokens 2 l and 2 l + 1 of the warp's 16 tokens, for lanes l < 8.
          const uint2 words = ptx::LoadShared64(tile[t] + 2 * T::kCodeBytes + 4 * T::kTokens * y +
                                                64 * (lane % 4) + 32 * e + 8 * warp);
          meta[t][y][e] = lane < 4 ? words.x : words.y;
        }
      }
    }
    tiles.Release();
    if (step >= U::kBuffers) WaitStep(barriers.keys_free, step - U::kBuffers);
#pragma unroll
    for (int t = 0; t < U::kStepTiles; ++t) {
      const uint32_t at = buffer * sizeof(UnpackedKeys<T>) + T::kTokens * t * U::kLineBytes;
#pragma unroll
      for (int q = 0; q < 2; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t x[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) x[k] = CodePair(codes[t][i], 4 * q + k);
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
  }
}

// Unpacks values to code * scale + minimum, divided by a power of two whose exponent only grows.
// The first warp copies tiles: behind each step those that take the slot of the step before it, or
// of the step itself (kRefillLag).
template <class T>
class ValueUnpacker {
  using U = WarpgroupTraits<T>;
  static constexpr int kMetaOffset = 2 * T::kCodeBytes + T::kMetaBytes, kPieces = T::kDim / 32;

 public:
  __device__ __forceinline__ ValueUnpacker(const Block<T>& block, TileCopier<T>& copier,
                                           WgmmaShared<T>& shared, WgmmaBarriers<T>& barriers)
      : steps_(PageSteps(block)),
        tiles_(block, shared, barriers),
        copier_(copier),
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
#pragma unroll 1
    for (uint32_t step = 0; step < steps_; ++step) {
      const uint32_t buffer = step % U::kBuffers;
      uint32_t tile[U::kStepTiles];
      tiles_.Wait(tile);
      MetaRange range;
#pragma unroll
      for (const uint32_t from : tile) {
#pragma unroll
        for (int y = 0; y < T::kGroups; ++y) {
          const uint2 words =
              ptx::LoadShared64(from + kMetaOffset + 4 * T::kTokens * y + 8 * lane_);
          range.Add(words.x);
          range.Add(words.y);
        }
      }
      exponent_ = max(exponent_, range.Exponent());
      if (step >= U::kBuffers) WaitStep(barriers_.values_free, step - U::kBuffers);
      if (threadIdx.x % T::kThreads == 0) shared_.value_exponent[buffer] = exponent_;
#pragma unroll
      for (int t = 0; t < U::kStepTiles; ++t) {
        Unpack(tile[t], buffer * sizeof(UnpackedValues<T>) + t * T::kDim * U::kLineBytes);
      }
      tiles_.Release();
      ptx::FenceCopyEngine();
      ArriveStep(barriers_.values, step);
      if (warp_ == 0 && step + 1 > U::kRefillLag) copier_.Refill();
    }
  }

 private:
  __device__ __forceinline__ void Unpack(uint32_t tile, uint32_t at) const {
    uint32_t w[T::kWords];
    LoadCodeWords(tile + T::kCodeBytes + 4 * T::kDim * warp_, lane_, w);
    // Scale and minimum of tokens 8 b + 2 c + e of the warp's 16.
    uint2 word[T::kGroups][2];
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        word[y][e] = ptx::LoadShared64(tile + kMetaOffset + 4 * T::kTokens * y + 64 * (lane_ % 4) +
                                       32 * e + 8 * warp_);
      }
    }
    const float unit = PowerOfTwo(-exponent_);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      uint32_t low = 0, high = 0, minimum = 0;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {  // 32 channels
        const int y = piece * T::kGroups / kPieces;
        if (piece * T::kGroups % kPieces == 0) {
          const uint32_t even = b == 0 ? word[y][0].x : word[y][0].y;
          const uint32_t odd = b == 0 ? word[y][1].x : word[y][1].y;
          const float s0 = ptx::LowHalf(even) * unit, s1 = ptx::LowHalf(odd) * unit;
          low = ptx::PackHalf(s0 * 0x1p18f, s1 * 0x1p18f);
          high = ptx::PackHalf(s0 * 0x1p16f, s1 * 0x1p16f);
          minimum = ptx::PackHalf(ptx::HighHalf(even) * unit, ptx::HighHalf(odd) * unit);
        }
        uint32_t x[4];
        UnpackPairs(w[2 * (piece / 2) + b], piece % 2, low, high, minimum, x);
        ptx::StoreMatrices(to_[b] + at + 32 * piece * U::kLineBytes, x);
      }
    }
  }

  const uint32_t steps_;
  TileReader<T> tiles_;
  TileCopier<T>& copier_;
  WgmmaShared<T>& shared_;
  WgmmaBarriers<T>& barriers_;
  const int warp_, lane_;
  uint32_t to_[2];
  int exponent_ = INT_MIN;
};

// Producer warps over pages: four unpack K, four V.
template <class T>
__device__ __forceinline__ void ProducePages(const PrefillAttentionParams& p, const Block<T>& block,
                                             bool value, WgmmaShared<T>& shared,
                                             WgmmaBarriers<T>& barriers) {
  // Behind WaitForConsumers the memory that tiles are unpacked to is free and the query's exponent
  // is known.
  if (value) {
    TileCopier<T> copier(p, block, shared, barriers);
    if (threadIdx.x % T::kThreads < 32) copier.Fill();
    WaitForConsumers<T>(value);
    ValueUnpacker<T>(block, copier, shared, barriers).Run();
    return;
  }
  WaitForConsumers<T>(value);
  if constexpr (T::kExact) {
    UnpackKeyCodes<T>(block, shared, barriers);
  } else {
    KeyUnpacker<T>(block, shared, barriers).Run();
  }
}

#endif

}  // namespace crumb::kernels::cuda::prefill
