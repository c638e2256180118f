// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/decode/decode_ptx.cuh"
#include "kernels/cuda/prefill/query.cuh"
#include "kernels/cuda/prefill/traits.cuh"

// Prefill by Hopper's products of four warps: what its parts share. A block has two teams of four
// warps, each with 64 query rows, and eight warps that bring tokens for both, four K and four V:
// they unpack tiles (prefill_team_pages.cuh) and copy BF16 rows (prefill_team_rows.cuh). Query rows
// are the rows of every product, a row's softmax stays in four lanes.
namespace crumb::kernels::cuda::prefill {

// p reaches 2^kTeamHeadroom where a reference is set; it is moved when p gets beyond 2^kTeamMost.
inline constexpr float kTeamHeadroom = 10.0f;
inline constexpr float kTeamMost = 15.0f;

template <class T>
struct TeamTraits {
  static_assert(T::kDim == 128 && T::kWarps == 4 && T::kBlockColumns == 128 && T::kGroups <= 2);
  static constexpr int kTeams = 2;
  static constexpr int kQueries = 64;                          // query rows of a team
  static constexpr int kThreads = (kTeams + 2) * T::kThreads;  // of a block
  static constexpr int kLineBytes = 128;  // of an operand: 64 channels or tokens
  static constexpr int kMatrixBytes = kQueries * kLineBytes;
  // Tiles of a step: two groups of a row have an accumulator each.
  static constexpr int kStepTiles = T::kGroups == 1 ? 2 : 1;
  static constexpr int kStepTokens = kStepTiles * T::kTokens;
  static constexpr int kBuffers = 4 / kStepTiles;  // of unpacked keys, and of values
  static constexpr int kSlots = 4;                 // of tiles as they are stored
  static constexpr int kRows = 64;                 // BF16 tokens of a stage
  static constexpr int kStages = 4;
  // Of each thread: 128 when the kernel starts.
  static constexpr int kBringRegisters = 40, kRegisters = 216;
};

// What a team has for itself. Matrices are [channel / 64] of a line per query row, in the 128-byte
// swizzle.
template <class T>
struct alignas(1024) TeamShared {
  using U = TeamTraits<T>;
  char operands[4][U::kMatrixBytes];       // q' in two fp16 parts; then the query, then the output
  float bias[U::kStepTiles][U::kQueries];  // of the logits of a step's tiles, log2 units
  int token[U::kQueries];                  // fresh token of the query row
  int row[U::kQueries];                    // of q and out, negative: no such row
};

// Unpacked keys of a step, [channel / 64], a line per token; or R in two bf16 parts.
template <class T>
struct TeamKeys {
  using U = TeamTraits<T>;
  char codes[2][U::kStepTokens][U::kLineBytes];
};
// Unpacked values of a step, a line of a tile's tokens per channel.
template <class T>
struct TeamValues {
  using U = TeamTraits<T>;
  char values[U::kStepTiles][T::kDim][U::kLineBytes];
};

// K or V of a tile as it is stored.
template <class T>
struct TeamTile {
  char codes[T::kCodeBytes];
  char meta[T::kMetaBytes];
};

template <class T>
struct TeamBlockShared {
  using U = TeamTraits<T>;
  TeamShared<T> team[U::kTeams];
  union {
    struct {
      char rotation[2][2][T::kDim][U::kLineBytes];  // [bf16 part][inner channel / 64][channel]
      char query[U::kTeams][2][U::kMatrixBytes];    // as it is
    };
    struct {
      TeamKeys<T> keys[U::kBuffers];
      TeamValues<T> values[U::kBuffers];
      TeamTile<T> tiles[2][U::kSlots];  // K, V
      // Of token pairs: scales, times what a score is to be multiplied with, and minima.
      float4 key_meta[U::kBuffers][T::kGroups][U::kStepTokens / 2];
    };
    char rows[U::kStages][2][2][U::kRows][U::kLineBytes];  // K and V, [channel / 64], tokens
  };
  int value_exponent[U::kBuffers];  // values of a step are divided by 2^exponent
  float most[U::kTeams * T::kWarps];
};

// Barriers in shared memory: of slots; of unpacked keys, values and of BF16 rows, arrived and free
// again.
template <class T>
struct TeamBarriers {
  using U = TeamTraits<T>;
  uint64_t tile[2][U::kSlots];  // K, V
  uint64_t keys[U::kBuffers], keys_free[U::kBuffers];
  uint64_t values[U::kBuffers], values_free[U::kBuffers];
  uint64_t rows[U::kStages], rows_free[U::kStages];
};

// A thread's place in its team, and what of the block's query rows the team has.
struct Team {
  int index, thread, warp, lane;
  int last_token;  // fresh token of the last query row that exists, -1: the team is idle

  template <class T>
  __device__ __forceinline__ explicit Team(const Block<T>& block)
      : index(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / T::kThreads, 0)),
        thread(static_cast<int>(threadIdx.x) % T::kThreads),
        warp(thread / 32),
        lane(thread % 32) {
    constexpr int kQueries = TeamTraits<T>::kQueries;
    const int count = min(block.columns - kQueries * index, kQueries);
    const int64_t last = block.first_column + kQueries * index + count - 1;
    last_token = count > 0 ? static_cast<int>(last / block.heads) : -1;
  }
  // Waits for the team.
  __device__ __forceinline__ void Sync() const { ptx::SyncThreads(1 + index, 128); }
  // Teams with query rows start their products in turns: one multiplies while the other makes
  // probabilities. The first turn is team 0's.
  template <class T>
  __device__ __forceinline__ void WaitTurn(const Block<T>& block) const {
    if (block.columns > TeamTraits<T>::kQueries) ptx::SyncThreads(7 + index, 256);
  }
  template <class T>
  __device__ __forceinline__ void Pass(const Block<T>& block) const {
    if (block.columns > TeamTraits<T>::kQueries) {
      asm volatile("bar.arrive %0, %1;" ::"r"(8 - index), "r"(256) : "memory");
    }
  }
  // Query row of the lane's accumulator elements [n][2 a + e].
  __device__ __forceinline__ int Query(int a) const { return 16 * warp + lane / 4 + 8 * a; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The running softmax of a warp's 16 query rows: element [n][2 a + e] of the output is row
// r + 8 a, channel 8 n + 2 c + e.
struct TeamState {
  float out[16][4] = {};
  float sum[2] = {};        // of p, this lane's tokens
  float reference[2] = {};  // negative, log2 units
  bool known = false;       // references mean something
};

__device__ __forceinline__ uint64_t Matrix(const void* shared) {
  return ptx::SwizzledMatrix(ptx::SharedAddress(shared));
}

// Waits for both teams.
__device__ __forceinline__ void SyncTeams() { ptx::SyncThreads(3, 256); }

// A team is done with what lies where the next tokens come to. It waits for nobody here: tokens
// have barriers of their own.
template <class T>
__device__ __forceinline__ void LetBring() {
  constexpr int kThreads = (TeamTraits<T>::kTeams + 1) * T::kThreads;
  asm volatile("bar.arrive 4, %0; bar.arrive 9, %0;" ::"n"(kThreads) : "memory");
}
// Waits for both teams: the warps that bring K, or V.
template <class T>
__device__ __forceinline__ void WaitToBring(bool value) {
  ptx::SyncThreads(value ? 9 : 4, (TeamTraits<T>::kTeams + 1) * T::kThreads);
}

// The use of a buffer that `step` makes, as the parity of its barrier.
template <int kBuffers>
__device__ __forceinline__ void WaitStep(const uint64_t (&barriers)[kBuffers], int step) {
  ptx::WaitBarrier(ptx::SharedAddress(&barriers[step % kBuffers]), step / kBuffers % 2);
}

// The warp has written, or read, its part of the buffer that `step` uses: every lane for itself.
template <int kBuffers>
__device__ __forceinline__ void ArriveStep(uint64_t (&barriers)[kBuffers], int step) {
  ptx::Arrive(ptx::SharedAddress(&barriers[step % kBuffers]), 1);
}

// One thread of the block; the others wait for the block afterwards.
template <class T>
__device__ __forceinline__ void InitTeamBarriers(const Block<T>& block, TeamBarriers<T>& barriers) {
  using U = TeamTraits<T>;
  const int readers = (block.columns > U::kQueries ? U::kTeams : 1) * T::kThreads;
  const auto init = [](uint64_t& barrier, int arrivals) {
    ptx::InitBarrier(ptx::SharedAddress(&barrier), arrivals);
  };
  for (int i = 0; i < U::kSlots; ++i) {
    init(barriers.tile[0][i], 1);
    init(barriers.tile[1][i], 1);
  }
  for (int i = 0; i < U::kBuffers; ++i) {
    init(barriers.keys[i], T::kThreads);
    init(barriers.values[i], T::kThreads);
    init(barriers.keys_free[i], readers);
    init(barriers.values_free[i], readers);
  }
  for (int i = 0; i < U::kStages; ++i) {
    init(barriers.rows[i], 2 * T::kThreads);
    init(barriers.rows_free[i], readers);
  }
  ptx::FenceBarrierInit();
  ptx::FenceCopyEngine();
}

// Where a lane stores its rows of a matrix's lines with StoreMatrices, pieces `piece` (even) and
// the next: matrices are rows r and r + 8 of the first piece, then of the second.
template <class T>
__device__ __forceinline__ uint32_t LineAddress(const char* matrix, int piece, const Team& team) {
  return ptx::SharedAddress(matrix) +
         (16 * team.warp + team.lane % 16) * TeamTraits<T>::kLineBytes +
         (((piece + team.lane / 16) ^ (team.lane % 8)) * 16);
}

// A pair as the sum of two fp16 pairs, within fp16's range.
__device__ __forceinline__ void SplitHalf(float x, float y, uint32_t* high, uint32_t* low) {
  *high = ptx::PackHalf(LimitHalf(x), LimitHalf(y));
  *low = ptx::PackHalf(LimitHalf(x) - ptx::LowHalf(*high), LimitHalf(y) - ptx::HighHalf(*high));
}

// Over the lanes that share query rows.
__device__ __forceinline__ float SumOverQuad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float MaxOverQuad(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// From a step's logits (minus references) to its probabilities, in place, still to be summed.
// References move where one got beyond the limit; then outputs are to be multiplied with `factor`,
// and the result is true.
template <int kTokenTiles>
__device__ __forceinline__ bool ExponentiateTeam(float (&t)[kTokenTiles][4], TeamState& state,
                                                 float (&factor)[2]) {
  // As integers positive ones compare as they do, and others are below them.
  int beyond[4] = {};
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const int i = n % 2 * 2;  // chains of their own
    beyond[i] = __vimax3_s32(beyond[i], __float_as_int(t[n][0]), __float_as_int(t[n][1]));
    beyond[i + 1] = __vimax3_s32(beyond[i + 1], __float_as_int(t[n][2]), __float_as_int(t[n][3]));
  }
  const int most = max(max(beyond[0], beyond[1]), max(beyond[2], beyond[3]));
  const bool moves = __any_sync(~0u, most > __float_as_int(kTeamMost) || !state.known);
  if (__builtin_expect(moves, 0)) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        top = fmaxf(top, fmaxf(t[n][2 * a], t[n][2 * a + 1]));
      }
      top = MaxOverQuad(top);
      if (state.known) top = fmaxf(top, kTeamHeadroom);
      const float moved = top > -INFINITY ? top - kTeamHeadroom : 0.0f;
      state.reference[a] -= moved;
      factor[a] = state.known ? ptx::Exp2(-moved) : 1.0f;
      state.sum[a] *= factor[a];
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        t[n][2 * a] -= moved;
        t[n][2 * a + 1] -= moved;
      }
    }
    state.known = true;
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) t[n][i] = ptx::Exp2(t[n][i]);
  }
  return moves;
}

__device__ __forceinline__ void ScaleTeam(const float (&factor)[2], TeamState& state) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[n][i] *= factor[i / 2];
  }
}

// --- Into INT2's bases and back ----------------------------------------------------------------

// The team's query rows as they are. Those that do not exist are zero.
template <class T>
__device__ __forceinline__ void LoadTeamQuery(const PrefillAttentionParams& p,
                                              const TeamShared<T>& shared, const Team& team,
                                              char* to) {
  constexpr int kPieces = T::kDim / 8;
#pragma unroll
  for (int k = 0; k < TeamTraits<T>::kQueries * kPieces / T::kThreads; ++k) {
    const int i = k * T::kThreads + team.thread, query = i / kPieces, piece = i % kPieces;
    const int row = shared.row[query];
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row >= 0) {
      x = static_cast<const uint4*>(p.q)[static_cast<int64_t>(row) * kPieces + piece];
    }
    *reinterpret_cast<uint4*>(to + piece / 8 * TeamTraits<T>::kMatrixBytes +
                              query * TeamTraits<T>::kLineBytes + ((piece ^ query) % 8) * 16) = x;
  }
}

// R as the columns of a product, in two bf16 parts: column n is R[n] or, transposed, what R[k][n]
// is over k. By both teams.
template <class T, bool kTransposed>
__device__ __forceinline__ void LoadTeamRotation(const float* rotation,
                                                 TeamBlockShared<T>& shared) {
  constexpr int kPieces = T::kDim / 8;
#pragma unroll 2
  for (int i = threadIdx.x; i < T::kDim * kPieces; i += TeamTraits<T>::kTeams * T::kThreads) {
    const int line = kTransposed ? i % T::kDim : i / kPieces;
    const int piece = kTransposed ? i / T::kDim : i % kPieces;
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      x[k] = __ldg(kTransposed ? rotation + (8 * piece + k) * T::kDim + line
                               : rotation + line * T::kDim + 8 * piece + k);
    }
    uint32_t high[4], low[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::SplitBf16(x[2 * k], x[2 * k + 1], &high[k], &low[k]);
    const int at = ((piece ^ line) % 8) * 16;
    *reinterpret_cast<uint4*>(shared.rotation[0][piece / 8][line] + at) =
        make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(shared.rotation[1][piece / 8][line] + at) =
        make_uint4(low[0], low[1], low[2], low[3]);
  }
}

// A descriptor of R's part `part`, inner channels from 16 step on.
template <class T>
__device__ __forceinline__ uint64_t RotationAt(const TeamBlockShared<T>& shared, int part,
                                               int step) {
  return Matrix(shared.rotation[part][step / 4][0]) + step % 4 * 2;
}

// rotated := q R_K. Leaves the query in shared.query.
template <class T>
__device__ __forceinline__ void RotateTeamQuery(const PrefillAttentionParams& p,
                                                const Block<T>& block, TeamBlockShared<T>& shared,
                                                const Team& team, float (&rotated)[16][4]) {
  char* query = shared.query[team.index][0];
  LoadTeamQuery<T>(p, shared.team[team.index], team, query);
  if (p.rotation_k == nullptr) {
    team.Sync();
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        const int row = team.Query(a);
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(
            query + n / 8 * TeamTraits<T>::kMatrixBytes + row * TeamTraits<T>::kLineBytes +
            ((n ^ row) % 8) * 16 + team.lane % 4 * 4);
        rotated[n][2 * a] = ptx::LowBf16(pair);
        rotated[n][2 * a + 1] = ptx::HighBf16(pair);
      }
    }
    return;
  }
  LoadTeamRotation<T, true>(p.rotation_k + static_cast<int64_t>(block.head) * T::kDim * T::kDim,
                            shared);
  ptx::FenceCopyEngine();
  SyncTeams();
  const uint64_t a = Matrix(query);
  ptx::FenceProducts();
#pragma unroll
  for (int part = 1; part >= 0; --part) {
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      ptx::GroupMmaBf16Shared(rotated, a + s / 4 * (TeamTraits<T>::kMatrixBytes / 16) + s % 4 * 2,
                              RotationAt<T>(shared, part, s), part == 0 || s > 0);
    }
  }
  ptx::CommitProducts();
  ptx::WaitProducts();
  ptx::TakeProducts(rotated);
}

// q' of the team's query rows as operands in two fp16 parts, and their sums over each group's
// channels: log2 units, times 2^exponent, the same for both teams, divided by what CodePair
// multiplies a channel's codes with.
template <class T>
__device__ __forceinline__ void PrepareTeamQuery(const PrefillAttentionParams& p,
                                                 const Block<T>& block, TeamBlockShared<T>& shared,
                                                 const Team& team, float (&sum)[T::kGroups][2]) {
  float rotated[16][4];
  RotateTeamQuery<T>(p, block, shared, team, rotated);
  const float factor = block.scale * kLog2E;
  float most = 0.0f;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(rotated[n][i]) * factor);
  }
  for (int step = 1; step < 32; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  if (team.lane == 0) shared.most[T::kWarps * team.index + team.warp] = most;
  SyncTeams();
#pragma unroll
  for (const float other : shared.most) most = fmaxf(most, other);
  const int exponent = QueryExponent(most);
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) sum[y][0] = sum[y][1] = 0.0f;
  char(&operands)[4][TeamTraits<T>::kMatrixBytes] = shared.team[team.index].operands;
#pragma unroll
  for (int n = 0; n < 16; n += 2) {
    float(&own)[2] = sum[n / 8 * T::kGroups / 2];
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // A channel's pair in its word is the number of its eight.
      const float unit = PowerOfTwo(CodeShift((n + i / 2) % 8));
      const float f = factor * PowerOfTwo(exponent) / unit;
      const float(&x)[4] = rotated[n + i / 2];
      SplitHalf(x[2 * (i % 2)] * f, x[2 * (i % 2) + 1] * f, &high[i], &low[i]);
      own[i % 2] = fmaf(ptx::LowHalf(high[i]) + ptx::LowHalf(low[i]), unit, own[i % 2]);
      own[i % 2] = fmaf(ptx::HighHalf(high[i]) + ptx::HighHalf(low[i]), unit, own[i % 2]);
    }
    ptx::StoreMatrices(LineAddress<T>(operands[n / 8], n % 8, team), high);
    ptx::StoreMatrices(LineAddress<T>(operands[2 + n / 8], n % 8, team), low);
  }
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
    for (int a = 0; a < 2; ++a) sum[y][a] = SumOverQuad(sum[y][a]) * PowerOfTwo(-exponent);
  }
}

// out := R_V times out, plus the softmax's mass times the mean before it. By both teams.
template <class T>
__device__ __forceinline__ void TurnTeamBack(const PrefillAttentionParams& p, const Block<T>& block,
                                             float unit, TeamBlockShared<T>& shared,
                                             const Team& team, TeamState& state) {
  if (p.rotation_v != nullptr) {
    LoadTeamRotation<T, false>(p.rotation_v + static_cast<int64_t>(block.head) * T::kDim * T::kDim,
                               shared);
  }
  const float mass[2] = {SumOverQuad(state.sum[0]), SumOverQuad(state.sum[1])};
  const float* mean =
      p.mean_v != nullptr ? p.mean_v + block.head * T::kDim + 2 * (team.lane % 4) : nullptr;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    float2 x = make_float2(0.0f, 0.0f);
    if (mean != nullptr) x = __ldg(reinterpret_cast<const float2*>(mean + 8 * n));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.out[n][i] = fmaf(state.out[n][i], unit, (i % 2 == 0 ? x.x : x.y) * mass[i / 2]);
    }
  }
  if (p.rotation_v == nullptr) return;
  uint32_t high[T::kSteps][4], low[T::kSteps][4];
#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&x)[4] = state.out[2 * s + i / 2];
      ptx::SplitBf16(x[2 * (i % 2)], x[2 * (i % 2) + 1], &high[s][i], &low[s][i]);
    }
  }
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[n][i] = 0.0f;
  }
  ptx::FenceCopyEngine();
  SyncTeams();
  ptx::FenceProducts();
#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) {
    const uint64_t b = RotationAt<T>(shared, 0, s);
    ptx::GroupMmaBf16<16>(state.out, high[s], RotationAt<T>(shared, 1, s));
    ptx::GroupMmaBf16<16>(state.out, low[s], b);
    ptx::GroupMmaBf16<16>(state.out, high[s], b);
  }
  ptx::CommitProducts();
  ptx::WaitProducts();
  ptx::TakeProducts(state.out);
}

#endif

}  // namespace crumb::kernels::cuda::prefill
