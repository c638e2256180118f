// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/prefill_team.cuh"

// A block's columns over INT2 page tiles by products of four warps, a tile at a time.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// --- Tiles -------------------------------------------------------------------------------------

// The block's tiles in shared memory, filled by warp 0.
template <class T>
class TeamStream {
 public:
  __device__ __forceinline__ TeamStream(const PrefillAttentionParams& p, const Block<T>& block,
                                        int begin, TeamShared<T>& shared)
      : p_(p), block_(block), shared_(shared), begin_(begin), next_(begin) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < TeamTraits<T>::kSlots; ++i) {
        ptx::InitBarrier(ptx::SharedAddress(&shared_.full[i]), 1);
      }
      ptx::FenceBarrierInit();
      ptx::FenceCopyEngine();
    }
  }

  // Asks for the next tile, into the slot of the one kSlots before it. Warp 0.
  __device__ __forceinline__ void Fill() {
    if (next_ >= block_.pages) return;
    const int index = (next_ - begin_) % 32, slot = (next_ - begin_) % TeamTraits<T>::kSlots;
    const int page = next_ + static_cast<int>(threadIdx.x % 32);
    if (index == 0 && page < block_.pages) {
      address_ =
          p_.page_address[static_cast<int64_t>(block_.sequence) * p_.shape.max_pages + page] +
          p_.page_layer_offset + block_.head * p_.page_head_stride;
    }
    const uint64_t from = __shfl_sync(~0u, address_, index);
    if (threadIdx.x == 0) {
      const uint32_t barrier = ptx::SharedAddress(&shared_.full[slot]);
      ptx::ArriveExpecting(barrier, T::kTileBytes);
      ptx::CopyBulkShared(ptx::SharedAddress(shared_.tiles[slot]), from, T::kTileBytes, barrier);
    }
    ++next_;
  }

  __device__ __forceinline__ const char* Tile(int index) const {
    return shared_.tiles[index % TeamTraits<T>::kSlots];
  }

  // Waits for tile `index`, counted from the first.
  __device__ __forceinline__ const char* Wait(int index) const {
    ptx::WaitBarrier(ptx::SharedAddress(&shared_.full[index % TeamTraits<T>::kSlots]),
                     index / TeamTraits<T>::kSlots % 2);
    return Tile(index);
  }

 private:
  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  TeamShared<T>& shared_;
  const int begin_;
  int next_;
  uint64_t address_ = 0;
};

// Scales and minima of a tile's values as pairs of tokens, by one warp. The exponent only grows.
template <class T>
__device__ __forceinline__ void PairValues(const char* tile, int index, int lane,
                                           TeamShared<T>& shared) {
  const char* from = tile + 2 * T::kCodeBytes + T::kMetaBytes + 64 * (lane % 4) + 4 * (lane / 4);
  uint32_t word[T::kGroups][2], scale = 0, minimum = 0;
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      word[y][e] = *reinterpret_cast<const uint32_t*>(from + 4 * T::kTokens * y + 32 * e);
      scale = max(scale, word[y][e] & 0x7fff);
      minimum = max(minimum, word[y][e] >> 16 & 0x7fff);
    }
  }
  // Below 2^(x / 2^10 - 14) each; sums stay in fp16's range.
  const int least = static_cast<int>(max(__reduce_max_sync(~0u, scale) / 1024 + 16,
                                         __reduce_max_sync(~0u, minimum) / 1024)) -
                    28;
  const int exponent = index == 0 ? least : max(least, shared.exponent[(index + 1) % 2]);
  if (lane == 0) shared.exponent[index % 2] = exponent;
  const float unit = PowerOfTwo(-exponent);
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    const float s0 = ptx::LowHalf(word[y][0]) * unit, s1 = ptx::LowHalf(word[y][1]) * unit;
    const float m0 = ptx::HighHalf(word[y][0]) * unit, m1 = ptx::HighHalf(word[y][1]) * unit;
    shared.values[index % 2][y][lane] = make_uint4(
        ptx::PackHalf(s0 * 0x1p18f, s1 * 0x1p18f), ptx::PackHalf(s0 * 0x1p16f, s1 * 0x1p16f),
        ptx::PackHalf(m0, m1), static_cast<uint32_t>(exponent));
  }
}

// --- Scores and probabilities ------------------------------------------------------------------

// Sums of code * q' of the warp's 16 tokens and all columns.
template <class T>
__device__ __forceinline__ void StartScores(const uint4& codes, uint64_t query,
                                            TeamScores (&acc)[T::kGroups]) {
  const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t a[4][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = CodePair(w[2 * half + i % 2], 2 * s + i / 2);
    }
    const int y = half * T::kGroups / 2;
    ptx::FenceProducts();
#pragma unroll
    for (int part = 1; part >= 0; --part) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const bool first = part == 1 && s == 0 && (half == 0 || T::kGroups == 2);
        ptx::GroupMmaF16Onto(acc[y], a[s],
                             query + part * (TeamTraits<T>::kMatrixBytes / 8) +
                                 half * (TeamTraits<T>::kMatrixBytes / 16) + 2 * s,
                             !first);
      }
    }
  }
  ptx::CommitProducts();
}

// Scale (times factor) and minimum of tokens r and r + 8 of the warp's 16.
template <class T>
struct TeamMeta {
  float scale[T::kGroups][2], minimum[T::kGroups][2];

  __device__ __forceinline__ TeamMeta(const char* tile, float factor, int warp, int lane) {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      const uint2 words = *reinterpret_cast<const uint2*>(
          tile + 2 * T::kCodeBytes + 4 * T::kTokens * y + 32 * (lane / 4) + 8 * warp);
      scale[y][0] = ptx::LowHalf(words.x) * factor, minimum[y][0] = ptx::HighHalf(words.x);
      scale[y][1] = ptx::LowHalf(words.y) * factor, minimum[y][1] = ptx::HighHalf(words.y);
    }
  }
};

// What logits of columns 8 n + 2 c + e have beside the product, minus their references, log2 units:
// element 2 a + e.
template <class T>
__device__ __forceinline__ void LogitRest(const TeamMeta<T>& meta, const TeamShared<T>& shared,
                                          int n, int c, float (&t)[4]) {
  float terms[2][TeamTraits<T>::kTerms];
  if constexpr (T::kGroups == 1) {
    const float4 x = *reinterpret_cast<const float4*>(shared.terms[8 * n + 2 * c]);
    terms[0][0] = x.x, terms[0][1] = x.y, terms[1][0] = x.z, terms[1][1] = x.w;
  } else {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float4 x = *reinterpret_cast<const float4*>(shared.terms[8 * n + 2 * c + e]);
      terms[e][0] = x.x, terms[e][1] = x.y, terms[e][2] = x.z;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    t[i] = terms[i % 2][0];
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      t[i] = fmaf(terms[i % 2][1 + y], meta.minimum[y][i / 2], t[i]);
    }
  }
}

template <class T>
__device__ __forceinline__ void AddProduct(const TeamScores (&acc)[T::kGroups],
                                           const TeamMeta<T>& meta, int n, float (&t)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) t[i] = fmaf(acc[y][n][i], meta.scale[y][i / 2], t[i]);
  }
}

// Probabilities of the warp's tokens, from their logits, into shared memory, a line per column, and
// onto the sums. Returns whether one of this lane is beyond the limit.
template <class T>
__device__ __forceinline__ bool Exponentiate(TeamScores& t, uint32_t line, float (&sum)[16]) {
  __half2 most = __float2half2_rn(0.0f);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    uint32_t packed[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float(&x)[4] = t[n + k];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = ptx::Exp2(x[i]);
      sum[2 * (n + k)] += x[0] + x[2];
      sum[2 * (n + k) + 1] += x[1] + x[3];
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        packed[2 * k + a] = ptx::PackHalf(x[2 * a], x[2 * a + 1]);
        most = __hmax2(most, reinterpret_cast<const __half2&>(packed[2 * k + a]));
      }
    }
    ptx::StoreMatricesTransposed(line + n * 8 * TeamTraits<T>::kLineBytes, packed);
  }
  ptx::FenceCopyEngine();
  return fmaxf(__low2float(most), __high2float(most)) > kTeamLimit;
}

// --- Values ------------------------------------------------------------------------------------

// Two codes at `mask` of a word as values of two tokens.
__device__ __forceinline__ uint32_t Value(uint32_t word, uint32_t mask, uint32_t scale,
                                          uint32_t minimum) {
  const uint32_t code = word & mask;
  const __half2 value =
      __hfma2(reinterpret_cast<const __half2&>(code), reinterpret_cast<const __half2&>(scale),
              reinterpret_cast<const __half2&>(minimum));
  return reinterpret_cast<const uint32_t&>(value);
}

// What StartValues needs of a tile, as far as registers hold it.
template <class T>
struct TeamValues {
  static constexpr bool kAll = T::kGroups == 1;
  uint4 codes[T::kTokens / 16];
  uint4 pairs[kAll ? T::kTokens / 8 : 1];
  int exponent;

  __device__ __forceinline__ TeamValues(const char* tile, const uint4 (&values)[T::kGroups][32],
                                        int lane) {
#pragma unroll
    for (int i = 0; i < (kAll ? T::kTokens / 8 : 1); ++i) pairs[i] = values[0][4 * i + lane % 4];
    exponent = static_cast<int>(pairs[0].w);
  }
  __device__ __forceinline__ void LoadCodes(const char* tile, int lane) {
#pragma unroll
    for (int u = 0; u < T::kTokens / 16; ++u) {
      codes[u] =
          *reinterpret_cast<const uint4*>(tile + T::kCodeBytes + 4 * T::kDim * u + 16 * lane);
    }
  }
};

// out += values times probabilities: channels 16 warp + 64 m of all columns.
template <class T>
__device__ __forceinline__ void StartValues(const TeamValues<T>& tile,
                                            const uint4 (&values)[T::kGroups][32],
                                            uint64_t probabilities, int warp, int lane,
                                            TeamOutput& out) {
  // The warp's pairs 2 warp, + 1 come to bits 6 and 8.
  const uint32_t turn = (38 - 4 * warp) % 32;
#pragma unroll
  for (int u = 0; u < T::kTokens / 16; u += 2) {
    uint32_t a[2][2][4];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const uint4& codes = tile.codes[u + v];
      const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int i = 2 * (u + v) + b;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          uint4 pair;
          if constexpr (TeamValues<T>::kAll) {
            pair = tile.pairs[i];
          } else {
            pair = values[m][4 * i + lane % 4];
          }
          const uint32_t x = __funnelshift_l(w[2 * m + b], w[2 * m + b], turn);
          a[v][m][2 * b] = Value(x, 0x00c000c0u, pair.x, pair.z);
          a[v][m][2 * b + 1] = Value(x, 0x03000300u, pair.y, pair.z);
        }
      }
    }
    ptx::FenceProducts();
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::GroupMmaF16Onto(out[m], a[v][m], probabilities + 2 * (u + v), true);
      }
    }
  }
  ptx::CommitProducts();
}

// --- All pages ---------------------------------------------------------------------------------

// The loop over a block's pages: scores of the next tile and values of this one together. What
// comes from shared memory is asked for before products start, what need not be in time is done
// while they run.
template <class T>
class TeamPages {
 public:
  __device__ __forceinline__ TeamPages(const PrefillAttentionParams& p, const Block<T>& block,
                                       float factor, TeamShared<T>& shared, int warp, int lane,
                                       TeamState& state)
      : p_(p),
        block_(block),
        factor_(factor),
        shared_(shared),
        warp_(warp),
        lane_(lane),
        state_(state),
        stream_(p, block, 0, shared),
        next_bias_page_(p.offset != nullptr || p.shift != nullptr ? 0 : INT_MAX) {}

  // Leaves outputs divided by 2^exponent, which is returned.
  __device__ __forceinline__ int Attend() {
    ptx::FenceCopyEngine();
    __syncthreads();
    if (warp_ == 0) {
      for (int i = 0; i < TeamTraits<T>::kSlots - 1; ++i) stream_.Fill();
    }
    if (next_bias_page_ == 0) SetBias(0);
    if constexpr (kAhead) {
      StartScores<T>(KeyCodes(0), Matrix(shared_.operands[0]), acc_);
      if (warp_ == 0) PairValues<T>(stream_.Tile(0), 0, lane_, shared_);
      ptx::WaitProducts();
      Finish(0);
#pragma unroll 1
      for (int index = 0; index < block_.pages - 1; ++index) Advance(index);
      AddValues(block_.pages - 1);
    } else {
#pragma unroll 1
      for (int index = 0; index < block_.pages; ++index) {
        if (index == next_bias_page_) SetBias(index);
        StartScores<T>(KeyCodes(index), Matrix(shared_.operands[0]), acc_);
        if (warp_ == index % T::kWarps) PairValues<T>(stream_.Tile(index), index, lane_, shared_);
        Finish(index);
        if (warp_ == 0) stream_.Fill();
        AddValues(index);
      }
    }
    return exponent_;
  }

 private:
  // Whether registers hold scores and values of two tiles at once.
  static constexpr bool kAhead = T::kGroups == 1;

  // Scores of tile index + 1 and values of tile `index`.
  __device__ __forceinline__ void Advance(int index) {
    if (__builtin_expect(index + 1 == next_bias_page_, 0)) SetBias(index + 1);
    const uint4 codes = KeyCodes(index + 1);
    const auto& pairs = shared_.values[index % 2];
    TeamValues<T> values(stream_.Tile(index), pairs, lane_);
    if (__builtin_expect(values.exponent != exponent_, 0)) Rescale(values.exponent);
    StartScores<T>(codes, Matrix(shared_.operands[0]), acc_);
    values.LoadCodes(stream_.Tile(index), lane_);
    StartValues<T>(values, pairs, Matrix(shared_.probabilities[index % 2]), warp_, lane_,
                   state_.out);
    if (warp_ == 0) {
      stream_.Fill();
    } else if (warp_ == 1 + index % (T::kWarps - 1)) {
      PairValues<T>(stream_.Tile(index + 1), index + 1, lane_, shared_);
    }
    Finish(index + 1);
  }

  __device__ __forceinline__ void AddValues(int index) {
    const auto& pairs = shared_.values[index % 2];
    TeamValues<T> values(stream_.Tile(index), pairs, lane_);
    if (values.exponent != exponent_) Rescale(values.exponent);
    values.LoadCodes(stream_.Tile(index), lane_);
    StartValues<T>(values, pairs, Matrix(shared_.probabilities[index % 2]), warp_, lane_,
                   state_.out);
    ptx::WaitProducts();
  }

  __device__ __forceinline__ uint4 KeyCodes(int index) const {
    return *reinterpret_cast<const uint4*>(stream_.Wait(index) + 4 * T::kDim * warp_ + 16 * lane_);
  }

  // From the tile's scores to its probabilities, while values of the tile before may still be
  // added.
  __device__ __forceinline__ void Finish(int index) {
    const TeamMeta<T> meta(stream_.Tile(index), factor_, warp_, lane_);
    const uint32_t line = LineAddress<T>(shared_.probabilities[index % 2], warp_, lane_);
    TeamScores t;
    if constexpr (kAhead) {
#pragma unroll
      for (int n = 0; n < 8; ++n) LogitRest<T>(meta, shared_, n, lane_ % 4, t[n]);
    }
    ptx::WaitOlderProducts<kAhead ? 1 : 0>();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if constexpr (!kAhead) LogitRest<T>(meta, shared_, n, lane_ % 4, t[n]);
      AddProduct<T>(acc_, meta, n, t[n]);
    }
    const bool beyond = Exponentiate<T>(t, line, state_.sum) || index == 0;
    ptx::WaitProducts();
    // Whoever is here has read the tile before.
    if (__builtin_expect(__syncthreads_or(beyond), 0)) {
      Follow(meta);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        LogitRest<T>(meta, shared_, n, lane_ % 4, t[n]);
        AddProduct<T>(acc_, meta, n, t[n]);
      }
      Exponentiate<T>(t, line, state_.sum);
      __syncthreads();
    }
  }

  // Takes the tile's probabilities out of the sums again and follows its logits.
  __device__ __forceinline__ void Follow(const TeamMeta<T>& meta) {
    float most[16];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float t[4];
      LogitRest<T>(meta, shared_, n, lane_ % 4, t);
      AddProduct<T>(acc_, meta, n, t);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        most[2 * n + e] = fmaxf(t[e], t[2 + e]);
        float& sum = state_.sum[2 * n + e];
        // What such a probability is beside is nothing.
        sum = isfinite(sum) ? sum - (ptx::Exp2(t[e]) + ptx::Exp2(t[2 + e])) : 0.0f;
      }
    }
    FollowTeam<T>(most, shared_, warp_, lane_, state_);
  }

  __device__ __forceinline__ void Rescale(int wanted) {
    const float unit = PowerOfTwo(max(exponent_ - wanted, -126));
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state_.out[0][n][i] *= unit;
        state_.out[1][n][i] *= unit;
      }
    }
    exponent_ = wanted;
  }

  // Keeps offset and shift in the references: sets them for the position block of `page`.
  __device__ __forceinline__ void SetBias(int page) {
    const int position_block =
        p_.offset != nullptr ? min(page / p_.pages_per_position_block, p_.position_blocks - 1) : 0;
    next_bias_page_ = p_.offset != nullptr && position_block + 1 < p_.position_blocks
                          ? (position_block + 1) * p_.pages_per_position_block
                          : INT_MAX;
    __syncthreads();
    if (threadIdx.x < TeamTraits<T>::kColumns) {
      const int row = shared_.row[threadIdx.x];
      float bias = 0.0f;
      if (row >= 0 && p_.offset != nullptr) {
        bias = p_.offset[static_cast<int64_t>(row) * p_.position_blocks + position_block] *
               block_.scale;
      }
      if (row >= 0 && p_.shift != nullptr) bias -= p_.shift[row % p_.shape.q_heads];
      bias *= kLog2E;
      shared_.terms[threadIdx.x][0] += bias - shared_.bias[threadIdx.x];
      shared_.bias[threadIdx.x] = bias;
    }
    __syncthreads();
  }

  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  const float factor_;
  TeamShared<T>& shared_;
  const int warp_, lane_;
  TeamState& state_;
  TeamStream<T> stream_;
  TeamScores acc_[T::kGroups];
  int exponent_ = 0;
  int next_bias_page_;  // where the next position block begins
};

// All pages of the block's sequence: no caps, no window. Leaves outputs in the model's basis. Every
// thread of the block calls it; columns that do not exist take part with a query of zeros.
template <class T>
__device__ __forceinline__ void AttendPagesByTeam(const PrefillAttentionParams& p,
                                                  const Block<T>& block, TeamShared<T>& shared,
                                                  int warp, int lane, TeamState& state) {
  const float factor = PrepareTeamQuery<T>(p, block, shared, warp, lane);
  const int exponent = TeamPages<T>(p, block, factor, shared, warp, lane, state).Attend();
  TurnTeamBack<T>(p, block, PowerOfTwo(exponent), shared, warp, lane, state);
  // What follows has no bias.
  if (threadIdx.x < TeamTraits<T>::kColumns) {
    shared.terms[threadIdx.x][0] -= shared.bias[threadIdx.x];
  }
}

#endif

}  // namespace crumb::kernels::cuda::prefill
