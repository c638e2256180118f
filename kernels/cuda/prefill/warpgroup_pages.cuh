// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/prefill/warpgroup.cuh"

// A block's columns over INT2 page tiles, a step of one or two tiles at a time: four warps unpack
// tiles into shared memory, two teams multiply them with their query rows.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class T>
__device__ __forceinline__ int TeamSteps(const Block<T>& block) {
  constexpr int kStepTiles = TeamTraits<T>::kStepTiles;
  return (block.pages + kStepTiles - 1) / kStepTiles;
}

// --- Unpacking ---------------------------------------------------------------------------------

// Two codes at `mask` of a word as values of two tokens.
__device__ __forceinline__ uint32_t Value(uint32_t word, uint32_t mask, uint32_t scale,
                                          uint32_t minimum) {
  const uint32_t code = word & mask;
  const __half2 value =
      __hfma2(reinterpret_cast<const __half2&>(code), reinterpret_cast<const __half2&>(scale),
              reinterpret_cast<const __half2&>(minimum));
  return reinterpret_cast<const uint32_t&>(value);
}

// Half of the tiles, K or V, as they are stored: a ring in shared memory. By four warps, of which
// each reads 16 tokens of a tile.
template <class T>
class TeamTiles {
  using U = TeamTraits<T>;

 public:
  __device__ __forceinline__ TeamTiles(const PrefillAttentionParams& p, const Block<T>& block,
                                       bool value, TeamBlockShared<T>& shared,
                                       TeamBarriers<T>& barriers)
      : p_(p),
        block_(block),
        offset_(value ? T::kCodeBytes : 0),
        meta_offset_(2 * T::kCodeBytes + (value ? T::kMetaBytes : 0)),
        slots_(ptx::SharedAddress(shared.tiles[value][0].codes)),
        barriers_(ptx::SharedAddress(barriers.tile[value])) {
    for (int i = 0; i < U::kSlots; ++i) Fill();
  }

  // Asks for the next tile, into the slot of the one kSlots before it. The first warp.
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

  // Address of a page's codes in shared memory, behind them scales and minima. Waits for them. A
  // page behind the last, in the last step, is the last one again.
  __device__ __forceinline__ uint32_t Tile(int page) const {
    page = min(page, block_.pages - 1);
    ptx::WaitBarrier(barriers_ + 8 * (page % U::kSlots), page / U::kSlots % 2);
    return slots_ + page % U::kSlots * kSlotBytes;
  }

  // A step's slots have been read by all four warps.
  __device__ __forceinline__ void Release(int barrier) {
    ptx::SyncThreads(barrier, T::kThreads);
#pragma unroll
    for (int i = 0; i < U::kStepTiles; ++i) Fill();
  }

 private:
  static constexpr uint32_t kSlotBytes = sizeof(TeamTile<T>);

  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  const uint32_t offset_, meta_offset_;
  const uint32_t slots_, barriers_;
  int next_ = 0;
  uint64_t address_ = 0;
};

// Unpacks keys: they stay codes, masked, a power of two each, which is divided out of q'.
template <class T>
__device__ __forceinline__ void UnpackTeamKeys(const Block<T>& block, TeamTiles<T>& tiles,
                                               TeamBlockShared<T>& shared,
                                               TeamBarriers<T>& barriers) {
  using U = TeamTraits<T>;
  const int warp = static_cast<int>(threadIdx.x) / 32 % T::kWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float most = 0.0f;
#pragma unroll
  for (const float other : shared.most) most = fmaxf(most, other);
  const float factor = PowerOfTwo(24 - QueryExponent(most));
  // Of line l % 8 pieces l / 8 and 4 + l / 8.
  const uint32_t line = ptx::SharedAddress(shared.keys[0].codes[0][16 * warp + lane % 8]);
  const uint32_t to[2] = {line + ((lane / 8) ^ (lane % 8)) * 16,
                          line + ((4 + lane / 8) ^ (lane % 8)) * 16};
  const int steps = TeamSteps(block);
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
          // Of tokens 2 l, + 1 of the warp's 16, lanes l < 8.
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
      const uint32_t at = buffer * sizeof(TeamKeys<T>) + T::kTokens * t * U::kLineBytes;
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

// Unpacks values: they are made whole, divided by a power of two that only grows.
template <class T>
class TeamValueUnpacker {
  using U = TeamTraits<T>;

 public:
  __device__ __forceinline__ TeamValueUnpacker(const Block<T>& block, TeamTiles<T>& tiles,
                                               TeamBlockShared<T>& shared,
                                               TeamBarriers<T>& barriers)
      : block_(block),
        tiles_(tiles),
        shared_(shared),
        barriers_(barriers),
        warp_(static_cast<int>(threadIdx.x) / 32 % T::kWarps),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    // Pieces 2 warp and 2 warp + 1 of lines l.
    const uint32_t line = ptx::SharedAddress(shared.values[0].values[0][lane_]);
    to_[0] = line + ((2 * warp_) ^ (lane_ % 8)) * 16;
    to_[1] = line + ((2 * warp_ + 1) ^ (lane_ % 8)) * 16;
  }

  __device__ __forceinline__ void Run() {
    const int steps = TeamSteps(block_);
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
        Unpack(tile[t], buffer * sizeof(TeamValues<T>) + t * T::kDim * U::kLineBytes);
      }
      ptx::FenceCopyEngine();
      ArriveStep(barriers_.values, step);
      tiles_.Release(6);
    }
  }

 private:
  // Follows the largest scale and minimum of the step. The exponent only grows.
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
    // Below 2^(x / 2^10 - 14) each; sums stay in fp16's range.
    const int least = static_cast<int>(max(__reduce_max_sync(~0u, scale) / 1024 + 16,
                                           (__reduce_max_sync(~0u, minimum) >> 16) / 1024)) -
                      28;
    exponent_ = max(exponent_, least);
  }

  __device__ __forceinline__ void Unpack(uint32_t tile, uint32_t at) const {
    const uint4 codes = ptx::LoadShared128(tile + 4 * T::kDim * warp_ + 16 * lane_);
    // Tokens 8 b + 2 c + e of the warp's 16: scale and minimum.
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
        // For codes at bit 6 and at bit 8.
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
              // Pairs 4 q + 2 k, + 1 come to bits 6 and 8.
              const uint32_t turn = (38 - 4 * (2 * q + k)) % 32;
              const uint32_t turned = __funnelshift_l(w[2 * m + b], w[2 * m + b], turn);
              x[2 * k] = Value(turned, 0x00c000c0u, low, minimum);
              x[2 * k + 1] = Value(turned, 0x03000300u, high, minimum);
            }
            ptx::StoreMatrices(to_[b] + at + (64 * m + 32 * q) * U::kLineBytes, x);
          }
        }
      }
    }
  }

  const Block<T>& block_;
  TeamTiles<T>& tiles_;
  TeamBlockShared<T>& shared_;
  TeamBarriers<T>& barriers_;
  const int warp_, lane_;
  uint32_t to_[2];
  int exponent_ = INT_MIN;
};

// What the warps that bring tokens do over pages: four bring K, four V.
template <class T>
__device__ __forceinline__ void BringTeamPages(const PrefillAttentionParams& p,
                                               const Block<T>& block, bool value,
                                               TeamBlockShared<T>& shared,
                                               TeamBarriers<T>& barriers) {
  TeamTiles<T> tiles(p, block, value, shared, barriers);
  // From here on what lay where tiles are unpacked is read, and the query's exponent known.
  WaitToBring<T>(value);
  if (value) {
    TeamValueUnpacker<T>(block, tiles, shared, barriers).Run();
  } else {
    UnpackTeamKeys<T>(block, tiles, shared, barriers);
  }
}

// --- Products ----------------------------------------------------------------------------------

// A team over the unpacked tiles: scores of the next step and values of this one together.
template <class T>
class TeamPages {
  using U = TeamTraits<T>;
  static constexpr int kTokenTiles = U::kStepTokens / 8;

 public:
  __device__ __forceinline__ TeamPages(const PrefillAttentionParams& p, const Block<T>& block,
                                       const float (&query_sum)[T::kGroups][2],
                                       TeamBlockShared<T>& shared, TeamBarriers<T>& barriers,
                                       const Team& team, TeamState& state)
      : p_(p),
        block_(block),
        query_sum_(query_sum),
        shared_(shared),
        barriers_(barriers),
        team_(team),
        state_(state),
        query_(Matrix(shared.team[team.index].operands[0])),
        next_bias_page_(p.offset != nullptr || p.shift != nullptr ? 0 : INT_MAX) {}

  // Leaves outputs divided by 2^exponent, which is returned.
  __device__ __forceinline__ int Attend() {
    if (team_.last_token < 0) return 0;
    const int steps = TeamSteps(block_);
    float factor[2];
    FollowBias(0);
    StartScores(0);
    ptx::WaitProducts();
    Finish(0, factor);
    Pack();
    if (team_.index == 1 && steps > 1) team_.Pass(block_);
#pragma unroll 1
    for (int step = 0; step < steps - 1; ++step) {
      FollowBias(step + 1);
      team_.WaitTurn(block_);
      StartScores(step + 1);
      StartValues(step);
      if (team_.index == 0 || step < steps - 2) team_.Pass(block_);
      ptx::WaitOlderProducts<1>();
      const bool moved = Finish(step + 1, factor);
      ptx::WaitProducts();
      ptx::TakeProducts(state_.out);
      ArriveStep(barriers_.values_free, step);
      if (__builtin_expect(moved, 0)) ScaleTeam(factor, state_);
      Pack();
    }
    StartValues(steps - 1);
    ptx::WaitProducts();
    ptx::TakeProducts(state_.out);
    return exponent_;
  }

 private:
  // acc := q' times the step's codes, per group.
  __device__ __forceinline__ void StartScores(int step) {
    WaitStep(barriers_.keys, step);
    constexpr int kHalf = U::kMatrixBytes / 16, kKeys = U::kStepTokens * U::kLineBytes / 16;
    const uint64_t keys = Matrix(shared_.keys[step % U::kBuffers].codes[0][0]);
    ptx::FenceProducts();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int y = half * T::kGroups / 2;
#pragma unroll
      for (int part = 1; part >= 0; --part) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const bool first = part == 1 && s == 0 && (half == 0 || T::kGroups == 2);
          ptx::GroupMmaF16Shared<kTokenTiles>(acc_[y], query_ + (2 * part + half) * kHalf + 2 * s,
                                              keys + half * kKeys + 2 * s, !first);
        }
      }
    }
    ptx::CommitProducts();
  }

  // out += probabilities times the step's values.
  __device__ __forceinline__ void StartValues(int step) {
    WaitStep(barriers_.values, step);
    const int buffer = step % U::kBuffers;
    const int exponent = shared_.value_exponent[buffer];
    if (__builtin_expect(exponent != exponent_, 0)) {
      const float unit = PowerOfTwo(max(exponent_ - exponent, -126));
      ScaleTeam({unit, unit}, state_);
      exponent_ = exponent;
    }
    constexpr int kTile = T::kDim * U::kLineBytes / 16;
    const uint64_t values = Matrix(shared_.values[buffer].values[0][0]);
    ptx::FenceProducts();
#pragma unroll
    for (int k = 0; k < kTokenTiles / 2; ++k) {
      ptx::GroupMmaF16<16>(state_.out, packed_[k], values + k / 4 * kTile + k % 4 * 2);
    }
    ptx::CommitProducts();
  }

  // Scales and minima of tokens 8 n + 2 c, + 1 of a step.
  __device__ __forceinline__ void LoadMeta(int buffer, int n, float4 (&meta)[T::kGroups]) const {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      meta[y] = shared_.key_meta[buffer][y][4 * n + team_.lane % 4];
    }
  }

  // From the step's scores to its probabilities, in place, while values of the step before may
  // still be added. Returns whether references moved (ExponentiateTeam).
  __device__ __forceinline__ bool Finish(int step, float (&factor)[2]) {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) ptx::TakeProducts(acc_[y]);
    const int buffer = step % U::kBuffers;
#pragma unroll
    for (int t = 0; t < U::kStepTiles; ++t) {
      const float(&bias)[U::kQueries] = shared_.team[team_.index].bias[t];
      const float base[2] = {state_.reference[0] + bias[team_.Query(0)],
                             state_.reference[1] + bias[team_.Query(1)]};
#pragma unroll
      for (int n = 8 * t; n < 8 * t + 8; ++n) {
        float4 meta[T::kGroups];
        LoadMeta(buffer, n, meta);
        float x[4] = {base[0], base[0], base[1], base[1]};
#pragma unroll
        for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = fmaf(query_sum_[y][i / 2], i % 2 == 0 ? meta[y].z : meta[y].w, x[i]);
            x[i] = fmaf(acc_[y][n][i], i % 2 == 0 ? meta[y].x : meta[y].y, x[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) acc_[0][n][i] = x[i];
      }
      if (__builtin_expect(t > 0 && step * U::kStepTiles + t >= block_.pages, 0)) {
        asm volatile("");  // a branch: as selections they would be part of every step
#pragma unroll
        for (int n = 8 * t; n < 8 * t + 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc_[0][n][i] = -INFINITY;
        }
      }
    }
    ArriveStep(barriers_.keys_free, step);
    return ExponentiateTeam<kTokenTiles>(acc_[0], state_, factor);
  }

  // Probabilities as operands. Their sums are those of what was rounded: where one token is nearly
  // all of a row, its rounding is none.
  __device__ __forceinline__ void Pack() {
#pragma unroll
    for (int k = 0; k < kTokenTiles / 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&x)[4] = acc_[0][2 * k + i / 2];
        packed_[k][i] = ptx::PackHalf(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
        state_.sum[i % 2] += ptx::LowHalf(packed_[k][i]) + ptx::HighHalf(packed_[k][i]);
      }
    }
  }

  // What logits of the step's tiles have from offset and shift, in shared memory: the warp's own.
  __device__ __forceinline__ void FollowBias(int step) {
    const int first = step * U::kStepTiles;
    if (__builtin_expect(first + U::kStepTiles <= next_bias_page_ && !spread_, 1)) return;
    float(&bias)[U::kStepTiles][U::kQueries] = shared_.team[team_.index].bias;
    const int query = 16 * team_.warp + team_.lane % 16;
    __syncwarp();
    float own = bias[U::kStepTiles - 1][query];
    spread_ = false;
#pragma unroll
    for (int t = 0; t < U::kStepTiles; ++t) {
      if (first + t == next_bias_page_) {
        own = LoadBias(first + t, query);
        spread_ = t > 0;
      }
      bias[t][query] = own;
    }
    __syncwarp();
  }

  // The same in the position block of `page`, log2 units.
  __device__ __forceinline__ float LoadBias(int page, int query) {
    const int position_block =
        p_.offset != nullptr ? min(page / p_.pages_per_position_block, p_.position_blocks - 1) : 0;
    next_bias_page_ = p_.offset != nullptr && position_block + 1 < p_.position_blocks
                          ? (position_block + 1) * p_.pages_per_position_block
                          : INT_MAX;
    const int row = shared_.team[team_.index].row[query];
    float bias = 0.0f;
    if (row >= 0 && p_.offset != nullptr) {
      bias =
          p_.offset[static_cast<int64_t>(row) * p_.position_blocks + position_block] * block_.scale;
    }
    if (row >= 0 && p_.shift != nullptr) bias -= p_.shift[row % p_.shape.q_heads];
    return bias * kLog2E;
  }

  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  const float (&query_sum_)[T::kGroups][2];
  TeamBlockShared<T>& shared_;
  TeamBarriers<T>& barriers_;
  const Team& team_;
  TeamState& state_;
  const uint64_t query_;
  float acc_[T::kGroups][kTokenTiles][4];
  uint32_t packed_[kTokenTiles / 2][4];
  int exponent_ = 0;
  int next_bias_page_;   // where the next position block begins
  bool spread_ = false;  // the last step was the first to have it, in its last tile only
};

// All pages of the block's sequence: no caps, no window. Leaves outputs in the model's basis. Every
// thread of both teams calls it, an idle one's too; query rows that do not exist take part as
// zeros.
template <class T>
__device__ __forceinline__ void AttendPagesByTeam(const PrefillAttentionParams& p,
                                                  const Block<T>& block, TeamBlockShared<T>& shared,
                                                  TeamBarriers<T>& barriers, const Team& team,
                                                  TeamState& state) {
  float query_sum[T::kGroups][2];
  PrepareTeamQuery<T>(p, block, shared, team, query_sum);
  ptx::FenceCopyEngine();
  LetBring<T>();
  const int exponent = TeamPages<T>(p, block, query_sum, shared, barriers, team, state).Attend();
  SyncTeams();  // nobody multiplies any longer: what lies where tiles were is free
  TurnTeamBack<T>(p, block, PowerOfTwo(exponent), shared, team, state);
}

#endif

}  // namespace crumb::kernels::cuda::prefill
