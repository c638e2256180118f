// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/prefill_query.cuh"
#include "kernels/cuda/prefill_traits.cuh"
#include "kernels/cuda/sm90_products.cuh"

// Prefill by Hopper's products of four warps: what its parts share. Tokens are the rows of the
// score product and channels those of the value product, query rows the columns of both. Rows come
// from registers, columns from shared memory: a code is unpacked once for all columns of the block,
// and only the query and the probabilities lie in shared memory. A column's softmax is spread over
// the four warps.
namespace crumb::kernels::cuda::prefill {

// p reaches 2^kTeamHeadroom where a reference is set; it is moved when p gets beyond kTeamLimit.
inline constexpr float kTeamHeadroom = 10.0f;
inline constexpr float kTeamLimit = 0x1p15f;

template <class T>
struct TeamTraits {
  static_assert(T::kDim == 128 && T::kWarps == 4 && T::kBlockColumns == 64 && T::kGroups <= 2);
  static constexpr int kColumns = 64;
  static constexpr int kLineBytes = 128;  // of an operand: 64 channels or tokens of a column
  static constexpr int kMatrixBytes = kColumns * kLineBytes;
  static constexpr int kSlots = 6;
  static constexpr int kRows = 64;  // BF16 tokens of a stage
  static constexpr int kTerms = T::kGroups == 1 ? 2 : 4;
};

// Shared memory of a block. Matrices have a line per column, in the 128-byte swizzle.
template <class T>
struct TeamShared {
  using U = TeamTraits<T>;
  // q' in two fp16 parts, then the output in two bf16 parts: [part][channel / 64]. With BF16 rows
  // the query in the first two and the probabilities in two parts behind it.
  char operands[4][U::kMatrixBytes];
  union {
    char query[2][U::kMatrixBytes];  // as it is: [channel / 64]
    struct {
      char probabilities[2][U::kMatrixBytes];  // of two tiles
      char tiles[U::kSlots][T::kTileBytes];
      // Of token pairs: scales for codes at bit 6 and at bit 8, minima. Two tiles.
      uint4 values[2][T::kGroups][32];
    };
    char rows[2][2][U::kRows][T::kRowBytes];  // two stages: K, V
  };
  uint64_t full[U::kSlots];
  float bias[U::kColumns];  // of INT2 logits, log2 units
  // Of each column, log2 units: its negative reference, then sums of q' over each group's channels.
  float terms[U::kColumns][U::kTerms];
  float factor[U::kColumns];
  float partial[T::kWarps][U::kColumns];
  float most[T::kWarps];
  int exponent[2];         // values of a tile are divided by 2^exponent
  int token[U::kColumns];  // fresh token of the column
  int row[U::kColumns];    // of q and out, negative: no such column
};

// Row r + 8 a, column 8 n + 2 c + e of a warp's 16 rows: element [n][2 a + e].
using TeamScores = float[8][4];
// Channels 64 m + 16 warp + r + 8 a.
using TeamOutput = float[2][8][4];

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The running softmax of a lane: 16 columns, the tokens that are its rows.
struct TeamState {
  TeamOutput out = {};
  float sum[16] = {};
  bool known = false;  // references mean something
};

__device__ __forceinline__ uint64_t Matrix(const void* shared) {
  return ptx::SwizzledMatrix(ptx::SharedAddress(shared));
}

// Where a lane stores the 16 rows of its warp, columns 0 to 15, with StoreMatricesTransposed.
template <class T>
__device__ __forceinline__ uint32_t LineAddress(const char* matrix, int warp, int lane) {
  return ptx::SharedAddress(matrix) + (lane / 16 * 8 + lane % 8) * TeamTraits<T>::kLineBytes +
         (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16);
}

// A pair as the sum of two fp16 pairs, within fp16's range.
__device__ __forceinline__ void SplitHalf(float x, float y, uint32_t* high, uint32_t* low) {
  *high = ptx::PackHalf(LimitHalf(x), LimitHalf(y));
  *low = ptx::PackHalf(LimitHalf(x) - ptx::LowHalf(*high), LimitHalf(y) - ptx::HighHalf(*high));
}

// Sums of per-lane partial sums per column, into `sums` in shared memory.
template <class T>
__device__ __forceinline__ void SumColumns(const float (&part)[16], float unit,
                                           TeamShared<T>& shared, int warp, int lane, float* sums,
                                           int stride) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float x = SumOverRows(part[2 * n]), y = SumOverRows(part[2 * n + 1]);
    if (lane < 4) {
      *reinterpret_cast<float2*>(&shared.partial[warp][8 * n + 2 * lane]) = make_float2(x, y);
    }
  }
  __syncthreads();
  if (threadIdx.x < TeamTraits<T>::kColumns) {
    float sum = 0.0f;
    for (int i = 0; i < T::kWarps; ++i) sum += shared.partial[i][threadIdx.x];
    sums[threadIdx.x * stride] = sum * unit;
  }
  __syncthreads();
}

template <class T>
__device__ __forceinline__ float2 References(const TeamShared<T>& shared, int column) {
  return make_float2(shared.terms[column][0], shared.terms[column + 1][0]);
}

// Makes room for larger logits: `most` are the largest of a lane's columns minus their references.
template <class T>
__device__ __forceinline__ void FollowTeam(const float (&most)[16], TeamShared<T>& shared, int warp,
                                           int lane, TeamState& state) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float x = MaxOverRows(most[2 * n]), y = MaxOverRows(most[2 * n + 1]);
    if (lane < 4) {
      *reinterpret_cast<float2*>(&shared.partial[warp][8 * n + 2 * lane]) = make_float2(x, y);
    }
  }
  __syncthreads();
  if (threadIdx.x < TeamTraits<T>::kColumns) {
    float top = shared.partial[0][threadIdx.x];
    for (int i = 1; i < T::kWarps; ++i) top = fmaxf(top, shared.partial[i][threadIdx.x]);
    if (state.known) top = fmaxf(top, kTeamHeadroom);
    const float moved = top > -INFINITY ? top - kTeamHeadroom : 0.0f;
    shared.terms[threadIdx.x][0] -= moved;
    shared.factor[threadIdx.x] = state.known ? ptx::Exp2(-moved) : 1.0f;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 factor = *reinterpret_cast<const float2*>(&shared.factor[8 * n + 2 * (lane % 4)]);
    state.sum[2 * n] *= factor.x;
    state.sum[2 * n + 1] *= factor.y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.out[0][n][i] *= i % 2 == 0 ? factor.x : factor.y;
      state.out[1][n][i] *= i % 2 == 0 ? factor.x : factor.y;
    }
  }
  state.known = true;
}

// --- Into INT2's bases and back ----------------------------------------------------------------

// The block's query rows as they are, a matrix per 64 channels. Columns that do not exist are zero.
template <class T>
__device__ __forceinline__ void LoadTeamQuery(const PrefillAttentionParams& p,
                                              const TeamShared<T>& shared, char* to) {
  constexpr int kPieces = T::kDim / 8;
#pragma unroll
  for (int k = 0; k < TeamTraits<T>::kColumns * kPieces / T::kThreads; ++k) {
    const int i = k * T::kThreads + threadIdx.x, column = i / kPieces, piece = i % kPieces;
    const int row = shared.row[column];
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row >= 0) {
      x = *reinterpret_cast<const uint4*>(p.q + static_cast<int64_t>(row) * T::kDim + 8 * piece);
    }
    *reinterpret_cast<uint4*>(to + piece / 8 * TeamTraits<T>::kMatrixBytes +
                              column * TeamTraits<T>::kLineBytes + ((piece ^ column) % 8) * 16) = x;
  }
  ptx::FenceCopyEngine();
  __syncthreads();
}

// rotated := R_K' times the query rows: the warp's channels of all columns.
template <class T>
__device__ __forceinline__ void RotateTeamQuery(const float* rotation, const char* query, int warp,
                                                int lane, TeamOutput& rotated) {
  const uint64_t b = Matrix(query);
#pragma unroll 1
  for (int s = 0; s < T::kSteps; ++s) {
    uint32_t high[2][4], low[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      LoadPiece<false>(rotation, T::kDim, 4 * m + warp, s, lane, high[m], low[m]);
    }
    const uint64_t at = b + s / 4 * (TeamTraits<T>::kMatrixBytes / 16) + s % 4 * 2;
    ptx::FenceProducts();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      ptx::GroupMmaBf16Onto(rotated[m], low[m], at, s > 0);
      ptx::GroupMmaBf16Onto(rotated[m], high[m], at, true);
    }
    ptx::CommitProducts();
    ptx::WaitProducts();
  }
}

// The same without R_K.
template <class T>
__device__ __forceinline__ void ReadTeamQuery(const char* query, int warp, int lane,
                                              TeamOutput& rotated) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + 2 * (lane % 4) + i % 2;
        const char* piece = query + m * TeamTraits<T>::kMatrixBytes +
                            column * TeamTraits<T>::kLineBytes +
                            ((2 * warp + i / 2) ^ (column % 8)) * 16;
        rotated[m][n][i] = __uint_as_float(
            static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(piece)[lane / 4]) << 16);
      }
    }
  }
}

// q' of the block's columns as operands in two fp16 parts, and their sums: log2 units, times
// 2^exponent, divided by what CodePair multiplies a channel's codes with. Returns what a score is
// to be multiplied with beside its token's scale.
template <class T>
__device__ __forceinline__ float PrepareTeamQuery(const PrefillAttentionParams& p,
                                                  const Block<T>& block, TeamShared<T>& shared,
                                                  int warp, int lane) {
  TeamOutput rotated;
  LoadTeamQuery<T>(p, shared, shared.query[0]);
  if (p.rotation_k != nullptr) {
    RotateTeamQuery<T>(p.rotation_k + static_cast<int64_t>(block.head) * T::kDim * T::kDim,
                       shared.query[0], warp, lane, rotated);
  } else {
    ReadTeamQuery<T>(shared.query[0], warp, lane, rotated);
  }
  const float factor = block.scale * kLog2E;
  float most = 0.0f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(rotated[m][n][i]) * factor);
    }
  }
  for (int step = 1; step < 32; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  if (lane == 0) shared.most[warp] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < T::kWarps; ++i) most = fmaxf(most, shared.most[i]);
  const int exponent = QueryExponent(most);

  // The warp's channels are pairs 2 warp, 2 warp + 1 of their word.
  const float unit[2] = {PowerOfTwo(CodeShift(2 * warp)), PowerOfTwo(CodeShift(2 * warp + 1))};
  float sum[T::kGroups][16] = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          const float f = factor * PowerOfTwo(exponent) / unit[a];
          const float(&x)[4] = rotated[m][n + k];
          const int i = 2 * k + a, y = m * T::kGroups / 2;
          SplitHalf(x[2 * a] * f, x[2 * a + 1] * f, &high[i], &low[i]);
          float(&own)[16] = sum[y];
          own[2 * (n + k)] =
              fmaf(ptx::LowHalf(high[i]) + ptx::LowHalf(low[i]), unit[a], own[2 * (n + k)]);
          own[2 * (n + k) + 1] =
              fmaf(ptx::HighHalf(high[i]) + ptx::HighHalf(low[i]), unit[a], own[2 * (n + k) + 1]);
        }
      }
      ptx::StoreMatricesTransposed(
          LineAddress<T>(shared.operands[m], warp, lane) + n * 8 * TeamTraits<T>::kLineBytes, high);
      ptx::StoreMatricesTransposed(
          LineAddress<T>(shared.operands[2 + m], warp, lane) + n * 8 * TeamTraits<T>::kLineBytes,
          low);
    }
  }
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    SumColumns<T>(sum[y], PowerOfTwo(-exponent), shared, warp, lane, &shared.terms[0][1 + y],
                  TeamTraits<T>::kTerms);
  }
  return PowerOfTwo(24 - exponent);
}

// out := R_V times out, plus `mass` times the mean before it.
template <class T>
__device__ __forceinline__ void TurnTeamBack(const PrefillAttentionParams& p, const Block<T>& block,
                                             float unit, TeamShared<T>& shared, int warp, int lane,
                                             TeamState& state) {
  const float* mean = p.mean_v != nullptr ? p.mean_v + block.head * T::kDim : nullptr;
  if (mean != nullptr) SumColumns<T>(state.sum, 1.0f, shared, warp, lane, shared.factor, 1);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int channel = 64 * m + 16 * warp + lane / 4;
    const float mean0 = mean != nullptr ? mean[channel] : 0.0f;
    const float mean1 = mean != nullptr ? mean[channel + 8] : 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 mass = make_float2(0.0f, 0.0f);
      if (mean != nullptr) {
        mass = *reinterpret_cast<const float2*>(&shared.factor[8 * n + 2 * (lane % 4)]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state.out[m][n][i] = fmaf(state.out[m][n][i], unit,
                                  (i / 2 == 0 ? mean0 : mean1) * (i % 2 == 0 ? mass.x : mass.y));
      }
    }
  }
  if (p.rotation_v == nullptr) return;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&x)[4] = state.out[m][n + i / 2];
        ptx::SplitBf16(x[2 * (i % 2)], x[2 * (i % 2) + 1], &high[i], &low[i]);
      }
      const uint32_t line =
          LineAddress<T>(shared.operands[m], warp, lane) + n * 8 * TeamTraits<T>::kLineBytes;
      ptx::StoreMatricesTransposed(line, high);
      ptx::StoreMatricesTransposed(line + 2 * TeamTraits<T>::kMatrixBytes, low);
    }
  }
  ptx::FenceCopyEngine();
  __syncthreads();
  const float* rotation = p.rotation_v + static_cast<int64_t>(block.head) * T::kDim * T::kDim;
  const uint64_t b = Matrix(shared.operands[0]);
#pragma unroll 1
  for (int s = 0; s < T::kSteps; ++s) {
    uint32_t high[2][4], low[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      LoadPiece<true>(rotation, T::kDim, 4 * m + warp, s, lane, high[m], low[m]);
    }
    const uint64_t at = b + s / 4 * (TeamTraits<T>::kMatrixBytes / 16) + s % 4 * 2;
    const uint64_t at_low = at + 2 * (TeamTraits<T>::kMatrixBytes / 16);
    ptx::FenceProducts();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      ptx::GroupMmaBf16Onto(state.out[m], high[m], at_low, s > 0);
      ptx::GroupMmaBf16Onto(state.out[m], low[m], at, true);
      ptx::GroupMmaBf16Onto(state.out[m], high[m], at, true);
    }
    ptx::CommitProducts();
    ptx::WaitProducts();
  }
  __syncthreads();
}

#endif

}  // namespace crumb::kernels::cuda::prefill
