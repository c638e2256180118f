// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill_bf16.cuh"
#include "kernels/cuda/prefill_team.cuh"

// A block's columns over BF16 rows by products of four warps, 64 tokens at a time: sink, BF16
// pages, recent ring and the fresh tokens themselves. The query is exact, probabilities are split
// in two.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Asks for K and V of tokens first .. first + 63, zeros from `end` on.
template <class T>
__device__ __forceinline__ void FillTeamRows(const PrefillAttentionParams& p, const Block<T>& block,
                                             const RowSources& sources, int first, int end,
                                             int stage, TeamShared<T>& shared) {
  constexpr int kPieces = T::kDim / 8, kStep = T::kThreads / kPieces;
  if (first < end) {
    const int piece = threadIdx.x % kPieces;
    char* to = shared.rows[stage][0][threadIdx.x / kPieces] + 16 * piece;
    constexpr int kValues = TeamTraits<T>::kRows * T::kRowBytes;
#pragma unroll 4
    for (int row = threadIdx.x / kPieces; row < TeamTraits<T>::kRows; row += kStep) {
      if (first + row < end) {
        const auto from = [&](bool value) {
          return reinterpret_cast<const uint4*>(sources.Address(p, block, first + row, value)) +
                 piece;
        };
        ptx::CopyAsync16(ptx::SharedAddress(to), from(false));
        ptx::CopyAsync16(ptx::SharedAddress(to + kValues), from(true));
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(to + kValues) = make_uint4(0, 0, 0, 0);
      }
      to += kStep * T::kRowBytes;
    }
  }
  ptx::CommitCopies();
}

// Products of the query with the warp's 16 tokens.
template <class T>
__device__ __forceinline__ void ScoreTeamRows(const TeamShared<T>& shared, int stage, int warp,
                                              int lane, TeamScores& acc) {
  const uint32_t address = ptx::SharedAddress(shared.rows[stage][0][16 * warp]) +
                           lane % 16 * T::kRowBytes + lane / 16 * 16;
  const uint64_t query = Matrix(shared.operands[0]);
  uint32_t a[T::kSteps][4];
#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) ptx::LoadMatrices(a[s], address + 32 * s);
  ptx::FenceProducts();
#pragma unroll
  for (int s = 0; s < T::kSteps; ++s) {
    ptx::GroupMmaBf16Onto(acc, a[s], query + s / 4 * (TeamTraits<T>::kMatrixBytes / 16) + s % 4 * 2,
                          s > 0);
  }
  ptx::CommitProducts();
  ptx::WaitProducts();
}

// acc := logits minus references, log2 units; -inf where a column does not attend.
template <class T>
__device__ __forceinline__ void FinishTeamScores(const Block<T>& block, float factor, int first,
                                                 bool masked, const TeamShared<T>& shared, int lane,
                                                 TeamScores& acc) {
  const int before = block.sink + block.recent;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int column = 8 * n + 2 * (lane % 4);
    const float2 reference = References<T>(shared, column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      acc[n][i] = fmaf(acc[n][i], factor, i % 2 == 0 ? reference.x : reference.y);
    }
    if (!masked) continue;
    const int2 own = *reinterpret_cast<const int2*>(&shared.token[column]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first + 8 * (i / 2) + lane / 4;
      if (token > before + (i % 2 == 0 ? own.x : own.y)) acc[n][i] = -INFINITY;
    }
  }
}

// acc := probabilities, which go to shared memory in two parts. Their sums are added to `sum`.
template <class T>
__device__ __forceinline__ void PutTeamProbabilities(TeamScores& acc, TeamShared<T>& shared,
                                                     int warp, int lane, float (&sum)[16]) {
  const uint32_t line = LineAddress<T>(shared.operands[2], warp, lane);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float(&x)[4] = acc[n + i / 2];
      const int a = i % 2;
      x[2 * a] = ptx::Exp2(x[2 * a]);
      x[2 * a + 1] = ptx::Exp2(x[2 * a + 1]);
      sum[2 * (n + i / 2)] += x[2 * a];
      sum[2 * (n + i / 2) + 1] += x[2 * a + 1];
      ptx::SplitBf16(x[2 * a], x[2 * a + 1], &high[i], &low[i]);
    }
    ptx::StoreMatricesTransposed(line + n * 8 * TeamTraits<T>::kLineBytes, high);
    ptx::StoreMatricesTransposed(
        line + n * 8 * TeamTraits<T>::kLineBytes + TeamTraits<T>::kMatrixBytes, low);
  }
  ptx::FenceCopyEngine();
}

// out += values times probabilities.
template <class T>
__device__ __forceinline__ void AddTeamRows(const TeamShared<T>& shared, int stage, int warp,
                                            int lane, TeamOutput& out) {
  const uint32_t address = ptx::SharedAddress(shared.rows[stage][1]) +
                           (lane % 8 + lane / 16 * 8) * T::kRowBytes + lane / 8 % 2 * 16 +
                           32 * warp;
  const uint64_t probabilities = Matrix(shared.operands[2]);
#pragma unroll
  for (int u = 0; u < TeamTraits<T>::kRows / 16; u += 2) {
    uint32_t a[2][2][4];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::LoadMatricesTransposed(a[v][m], address + 16 * (u + v) * T::kRowBytes + 128 * m);
      }
    }
    ptx::FenceProducts();
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::GroupMmaBf16Onto(out[m], a[v][m],
                              probabilities + TeamTraits<T>::kMatrixBytes / 16 + 2 * (u + v), true);
        ptx::GroupMmaBf16Onto(out[m], a[v][m], probabilities + 2 * (u + v), true);
      }
    }
    ptx::CommitProducts();
  }
  ptx::WaitProducts();
}

// All BF16 tokens of the block's columns. Every thread of the block calls it.
template <class T>
__device__ __forceinline__ void AttendRowsByTeam(const PrefillAttentionParams& p,
                                                 const Block<T>& block, TeamShared<T>& shared,
                                                 int warp, int lane, TeamState& state) {
  const int before = block.sink + block.recent, end = before + block.last_token + 1;
  const float factor = block.scale * kLog2E;
  const RowSources sources(p, block);
  __syncthreads();
  FillTeamRows<T>(p, block, sources, 0, end, 0, shared);
  LoadTeamQuery<T>(p, shared, shared.operands[0]);
  int stage = 0;
#pragma unroll 1
  for (int first = 0; first < end; first += TeamTraits<T>::kRows) {
    ptx::WaitCopies<0>();
    __syncthreads();
    FillTeamRows<T>(p, block, sources, first + TeamTraits<T>::kRows, end, 1 - stage, shared);
    TeamScores acc;
    ScoreTeamRows<T>(shared, stage, warp, lane, acc);
    FinishTeamScores<T>(block, factor, first + 16 * warp,
                        first + TeamTraits<T>::kRows - 1 > before + block.first_token, shared, lane,
                        acc);
    float most[16];
    bool beyond = !state.known;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      most[i] = fmaxf(acc[i / 2][i % 2], acc[i / 2][2 + i % 2]);
      beyond |= most[i] > 15.0f;
    }
    if (__syncthreads_or(beyond)) {
      float old[16];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 reference = References<T>(shared, 8 * n + 2 * (lane % 4));
        old[2 * n] = reference.x;
        old[2 * n + 1] = reference.y;
      }
      FollowTeam<T>(most, shared, warp, lane, state);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 reference = References<T>(shared, 8 * n + 2 * (lane % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[n][i] += i % 2 == 0 ? reference.x - old[2 * n] : reference.y - old[2 * n + 1];
        }
      }
    }
    PutTeamProbabilities<T>(acc, shared, warp, lane, state.sum);
    __syncthreads();
    AddTeamRows<T>(shared, stage, warp, lane, state.out);
    stage = 1 - stage;
  }
}

// Divides by the softmax sums and writes the block's rows.
template <class T>
__device__ __forceinline__ void WriteTeamRows(const PrefillAttentionParams& p,
                                              TeamShared<T>& shared, int warp, int lane,
                                              TeamState& state) {
  using U = TeamTraits<T>;
  SumColumns<T>(state.sum, 1.0f, shared, warp, lane, shared.factor, 1);
  if (threadIdx.x < U::kColumns) {
    const int row = shared.row[threadIdx.x];
    float sum = shared.factor[threadIdx.x], reference = -shared.terms[threadIdx.x][0];
    float factor = 1.0f;
    if (p.sink_logit != nullptr && row >= 0) {
      const float logit = p.sink_logit[row % p.shape.q_heads] * kLog2E;
      const float top = fmaxf(reference, logit);
      factor = ptx::Exp2(reference - top);
      sum = sum * factor + ptx::Exp2(logit - top);
      reference = top;
    }
    shared.factor[threadIdx.x] = sum > 0.0f ? factor / sum : sum == 0.0f ? 0.0f : NAN;
    if (p.lse != nullptr && row >= 0) p.lse[row] = (reference + log2f(sum)) * kLn2;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 unit = *reinterpret_cast<const float2*>(&shared.factor[8 * n + 2 * (lane % 4)]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.out[0][n][i] *= i % 2 == 0 ? unit.x : unit.y;
      state.out[1][n][i] *= i % 2 == 0 ? unit.x : unit.y;
    }
  }
  if (p.out_type == OutType::kBf16) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&y)[4] = state.out[m][n + i / 2];
          x[i] = ptx::PackBf16(y[2 * (i % 2)], y[2 * (i % 2) + 1]);
        }
        ptx::StoreMatricesTransposed(
            LineAddress<T>(shared.operands[m], warp, lane) + n * 8 * U::kLineBytes, x);
      }
    }
    __syncthreads();
    constexpr int kPieces = T::kDim / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < U::kColumns * kPieces; i += T::kThreads) {
      const int column = i / kPieces, piece = i % kPieces, row = shared.row[column];
      if (row < 0) continue;
      reinterpret_cast<uint4*>(p.out)[static_cast<int64_t>(row) * kPieces + piece] =
          *reinterpret_cast<const uint4*>(shared.operands[piece / 8] + column * U::kLineBytes +
                                          ((piece ^ column) % 8) * 16);
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = shared.row[8 * n + 2 * (lane % 4) + e];
      if (row < 0) continue;
      float* to =
          static_cast<float*>(p.out) + static_cast<int64_t>(row) * T::kDim + 16 * warp + lane / 4;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        to[64 * m] = state.out[m][n][e];
        to[64 * m + 8] = state.out[m][n][2 + e];
      }
    }
  }
}

#endif

}  // namespace crumb::kernels::cuda::prefill
