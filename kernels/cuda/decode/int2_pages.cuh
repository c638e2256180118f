// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/page_layout.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/decode/logit_terms.cuh"
#include "kernels/cuda/decode/traits.cuh"

// Attention of a few query rows over INT2 page tiles by one warp. Tokens are the rows of the score
// MMA, channels the rows of the value MMA, and query rows the columns of both, so that codes become
// operands by masking alone (docs/kernels/decode.md, steps 4 to 6).
namespace crumb::kernels::cuda {

// The power of two that masking multiplies a code with, for output register pair `a` (channel 16 m
// + 8 a + r) of channel tile m.
__host__ __device__ constexpr int OutputShift(int m, int a) { return CodeShift(2 * (m % 4) + a); }

// A lane's part of the query.
template <class T>
struct Int2Query {
  uint32_t fragment[T::kDotTiles][T::kDotSteps][2];  // q' as signed bytes, high and low
  // sum of q' over each quantization group, in units of raw scores
  float sum[T::kGroups][T::kLaneRows];
  float factor[T::kLaneRows];  // raw score -> log2 units; 1 with a soft cap
  float bias[T::kLaneRows];    // added to the logit, log2 units; 0 with a soft cap
};

// Sums over a segment in addition to SegmentState.
template <class T>
struct Int2Sums {
  // Values are split around the middle of their row's range, v_min + 1.5 v_scale, so that the
  // rounding of p * v_scale to fp16 is multiplied by codes between -1.5 and 1.5 only.
  float middle[T::kGroups][T::kLaneRows] = {};        // sum of p * middle over this lane's tokens
  float rounded[T::kGroups][T::kQueryTiles][4] = {};  // 1.5 * sum of rounded p * v_scale
  float headroom = 0.0f;     // p reaches 2^headroom at the maximum, which uses fp16's range
  uint32_t scale_bound = 0;  // fp16 bits of the largest v_scale that headroom allows
};

template <class T>
__device__ __forceinline__ void LoadWords(uint32_t address, int lane, uint32_t (&w)[T::kWords]) {
  if constexpr (T::kWords == 2) {
    const uint2 x = ptx::LoadShared64(address + 8 * lane);
    w[0] = x.x, w[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < T::kWords / 4; ++i) {
      const uint4 x = ptx::LoadShared128(address + 512 * i + 16 * lane);
      w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
    }
  }
}

// Loads scale and minimum (one word) of the lane's tokens r + 8 a + 16 (first + u), to index 2 u +
// a.
template <class T>
__device__ __forceinline__ void LoadMeta(uint32_t address, int lane, int first,
                                         uint32_t (&meta)[T::kGroups][2 * T::kSoftmaxGroups]) {
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    const uint32_t from = address + 4 * T::kTokens * y + 32 * (lane / 4) + 8 * first;
    if constexpr (T::kSoftmaxGroups == 1) {
      const uint2 x = ptx::LoadShared64(from);
      meta[y][0] = x.x, meta[y][1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < T::kSoftmaxGroups / 2; ++i) {
        const uint4 x = ptx::LoadShared128(from + 16 * i);
        meta[y][4 * i] = x.x, meta[y][4 * i + 1] = x.y;
        meta[y][4 * i + 2] = x.z, meta[y][4 * i + 3] = x.w;
      }
    }
  }
}

// Computes the raw scores of kTogether 16-token groups from group `first` on: score[to + v][a][i]
// is token r + 8 a of group v, row element i. A byte of (word >> 4 b) & (3 << 2 h in each byte) is
// a code times 4^h, of code pairs q = 2 b + h and q + 4; the query of h = 1 was divided by 4.
template <class T>
__device__ __forceinline__ void ScoreTokens(
    const Int2Query<T>& query, uint32_t codes, int lane,
    const uint32_t (&meta)[T::kGroups][2 * T::kSoftmaxGroups], int first, int to,
    float (&score)[T::kSoftmaxGroups][2][T::kLaneRows]) {
  constexpr int kTogether = T::kTogether;
  uint32_t w[kTogether][T::kWords];
  int acc[kTogether][T::kGroups][T::kDotTiles][4] = {};
#pragma unroll
  for (int v = 0; v < kTogether; ++v) {
    LoadWords<T>(codes + 4 * T::kDim * (first + v), lane, w[v]);
  }
#pragma unroll
  for (int part = 0; part < T::kDim / 64; ++part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int v = 0; v < kTogether; ++v) {
        const uint32_t mask = half == 0 ? 0x03030303u : 0x0c0c0c0cu;
        const uint32_t w0 = w[v][2 * part], w1 = w[v][2 * part + 1];
        const uint32_t a0 = w0 & mask, a1 = w1 & mask;
        const uint32_t a2 = (w0 >> 4) & mask, a3 = (w1 >> 4) & mask;
#pragma unroll
        for (int split = 0; split < T::kGroupSplit; ++split) {
          const int step = (part * T::kGroupSplit + split) * 2 + half;
          const int y =
              (part * T::kGroupSplit + split) * T::kGroups / (T::kDim / 64 * T::kGroupSplit);
#pragma unroll
          for (int n = 0; n < T::kDotTiles; ++n) {
            ptx::MmaU8S8(acc[v][y][n], a0, a1, a2, a3, query.fragment[n][step][0],
                         query.fragment[n][step][1]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kTogether; ++v) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const int at = 2 * (to + v) + a;
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
        const float scale = ptx::LowHalf(meta[y][at]), minimum = ptx::HighHalf(meta[y][at]);
#pragma unroll
        for (int i = 0; i < T::kLaneRows; ++i) {
          const bool interleaved = T::Interleaved(i / 2);
          const int high = acc[v][y][i / 2 * 2][2 * a + i % 2];
          const int low = interleaved ? acc[v][y][i / 2 * 2][2 * a + 1]
                                      : acc[v][y][(i / 2 * 2 + 1) % T::kDotTiles][2 * a + i % 2];
          float& x = score[to + v][a][i];
          const float rest = y == 0 ? query.sum[y][i] * minimum : fmaf(query.sum[y][i], minimum, x);
          x = fmaf(static_cast<float>(high * 256 + low), scale, rest);
        }
      }
    }
  }
}

// Adds p V of 16 tokens to the output. `weight` is p * v_scale for each quantization group.
template <class T>
__device__ __forceinline__ void AddValues(uint32_t codes, int lane, int u,
                                          const float (&weight)[T::kGroups][2][T::kLaneRows],
                                          SegmentState<T>& state, Int2Sums<T>& sums) {
  uint32_t b[T::kGroups][T::kQueryTiles][2];
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        b[y][n][a] = ptx::TransposeMatrix(
            ptx::PackHalf(weight[y][a][2 * n],
                          T::Interleaved(n) ? 0.0f : weight[y][a][(2 * n + 1) % T::kLaneRows]));
      }
    }
  }
  constexpr uint32_t kThreeHalves = 0x3e003e00u;
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
      ptx::MmaF16(sums.rounded[y][n], kThreeHalves, kThreeHalves, kThreeHalves, kThreeHalves,
                  b[y][n][0], b[y][n][1]);
    }
  }
  uint32_t w[T::kWords];
  LoadWords<T>(codes + 4 * T::kDim * u, lane, w);
#pragma unroll
  for (int m = 0; m < T::kSteps; ++m) {
    const int i = 2 * (m / 4), j = 2 * (m % 4), y = m * T::kGroups / T::kSteps;
    const uint32_t a0 = CodePair(w[i], j), a1 = CodePair(w[i], j + 1);
    const uint32_t a2 = CodePair(w[i + 1], j), a3 = CodePair(w[i + 1], j + 1);
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
      ptx::MmaF16(state.out[n][m], a0, a1, a2, a3, b[y][n][0], b[y][n][1]);
    }
  }
}

// Raises the running max for larger logits (`best`: this lane's largest, log2 units) or headroom
// for larger value scales. It chooses the running max so that the largest key's p is a power of two
// and its p * v_scale exact in each group.
template <class T>
__device__ __forceinline__ void RaiseRunningMaxima(const float (&best)[T::kLaneRows],
                                                   uint32_t scale_most, SegmentState<T>& state,
                                                   Int2Sums<T>& sums) {
  const float old_headroom = sums.headroom;
  for (int step = 4; step < 32; step *= 2) {
    scale_most = max(scale_most, __shfl_xor_sync(~0u, scale_most, step));
  }
  if (scale_most > sums.scale_bound) {
    // The bound is the power of two above: p * v_scale * 2^headroom stays below 2^(10 + kKeyLag).
    const int exponent = ilogbf(fmaxf(ptx::LowHalf(scale_most), 0x1p-24f)) + 1;
    sums.headroom = static_cast<float>(10 - exponent);
    sums.scale_bound = scale_most;
  }
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
    const float maximum =
        fmaxf(MaxOverTokens(best[i]),
              state.running_max[i] > kNoLogit / 2 ? state.running_max[i] + old_headroom : kNoLogit);
    const float factor = state.RaiseRunningMax(i, maximum - sums.headroom);
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      sums.middle[y][i] *= factor;
      for (int e = i % 2; e < 4; e += T::Interleaved(i / 2) ? 1 : 2) {
        sums.rounded[y][i / 2][e] *= factor;
      }
    }
  }
}

// Attends 16-token groups first to first + kSoftmaxGroups - 1 of a tile. `adjust(score, u)` changes
// the raw scores of 16 tokens where logits are capped or positions masked.
template <class T, class Adjust>
__device__ __forceinline__ void AttendTokens(const Int2Query<T>& query, uint32_t tile, int lane,
                                             int first, const Adjust& adjust,
                                             SegmentState<T>& state, Int2Sums<T>& sums) {
  constexpr int kGroups = T::kSoftmaxGroups;
  uint32_t k_meta[T::kGroups][2 * kGroups], v_meta[T::kGroups][2 * kGroups];
  LoadMeta<T>(tile + 2 * T::kCodeBytes, lane, first, k_meta);
  float score[kGroups][2][T::kLaneRows];
#pragma unroll
  for (int u = 0; u < kGroups; u += T::kTogether) {
    ScoreTokens<T>(query, tile, lane, k_meta, first + u, u, score);
#pragma unroll
    for (int v = 0; v < T::kTogether; ++v) adjust(score[u + v], first + u + v);
  }
  // V's metadata is loaded here and not earlier, so that the scores can use its registers.
  LoadMeta<T>(tile + 2 * T::kCodeBytes + T::kMetaBytes, lane, first, v_meta);
  uint32_t scale_most = 0;
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      scale_most = __vmaxu2(scale_most, v_meta[y][i]);
    }
  }
  scale_most &= 0xffff;
  float best[T::kLaneRows];
  bool grows = scale_most > sums.scale_bound;
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
    float most = score[0][0][i];
#pragma unroll
    for (int e = 1; e < 2 * kGroups; ++e) most = fmaxf(most, score[e / 2][e % 2][i]);
    best[i] = fmaf(most, query.factor[i], query.bias[i]);
    grows |= best[i] - state.running_max[i] > sums.headroom + T::kKeyLag;
  }
  if (__any_sync(~0u, grows)) RaiseRunningMaxima<T>(best, scale_most, state, sums);

  float shift[T::kLaneRows];
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) shift[i] = query.bias[i] - state.running_max[i];
#pragma unroll
  for (int u = 0; u < kGroups; ++u) {
    float weight[T::kGroups][2][T::kLaneRows];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      float scale[T::kGroups], middle[T::kGroups];
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
        scale[y] = ptx::LowHalf(v_meta[y][2 * u + a]);
        middle[y] = fmaf(1.5f, scale[y], ptx::HighHalf(v_meta[y][2 * u + a]));
      }
#pragma unroll
      for (int i = 0; i < T::kLaneRows; ++i) {
        const float p = ptx::Exp2(fmaf(score[u][a][i], query.factor[i], shift[i]));
        state.sum[i] += p;
#pragma unroll
        for (int y = 0; y < T::kGroups; ++y) {
          weight[y][a][i] = p * scale[y];
          sums.middle[y][i] = fmaf(p, middle[y], sums.middle[y][i]);
        }
      }
    }
    AddValues<T>(tile + T::kCodeBytes, lane, first + u, weight, state, sums);
  }
}

// Attends all tokens of a tile.
template <class T, class Adjust>
__device__ __forceinline__ void AttendTile(const Int2Query<T>& query, uint32_t tile, int lane,
                                           const Adjust& adjust, SegmentState<T>& state,
                                           Int2Sums<T>& sums) {
#pragma unroll
  for (int first = 0; first < T::kTokens / 16; first += T::kSoftmaxGroups) {
    AttendTokens<T>(query, tile, lane, first, adjust, state, sums);
  }
}

template <class T>
__device__ __forceinline__ void LoadQuery(const DecodeKernelParams& k, const RotatedQuery& from,
                                          int lane, Int2Query<T>* query) {
  const uint4* fragment = reinterpret_cast<const uint4*>(from.fragment);
#pragma unroll
  for (int n = 0; n < T::kDotTiles; ++n) {
#pragma unroll
    for (int s = 0; s < T::kDotSteps; s += 2) {
      const uint4 x = fragment[(n * T::kDotSteps / 2 + s / 2) * 32 + lane];
      query->fragment[n][s][0] = x.x, query->fragment[n][s][1] = x.y;
      query->fragment[n][s + 1][0] = x.z, query->fragment[n][s + 1][1] = x.w;
    }
  }
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
    const float* constant = from.constant + T::RowOf(lane, i) * (1 + T::kGroups);
    query->factor[i] = HasSoftCap<T>(k) ? 1.0f : constant[0];
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) query->sum[y][i] = constant[1 + y];
    query->bias[i] = 0.0f;
  }
}

// Attends this warp's pages of a segment from `page` on and before `end`, and returns its next
// page. kUnmasked: without soft cap and sliding window.
template <class T, bool kUnmasked, class Ring>
__device__ __forceinline__ int AttendPages(const DecodeKernelParams& k, const Segment& segment,
                                           const RotatedQuery& rotated, const Worker& worker,
                                           int page, int end, Int2Query<T>& query, Ring& ring,
                                           SegmentState<T>& state, Int2Sums<T>& sums) {
  const int lane = threadIdx.x % 32;
  for (; page < end; page += worker.warps) {
    const uint32_t tile = ring.Wait(k);
    AttendTile<T>(
        query, tile, lane,
        [&](float(&score)[2][T::kLaneRows], int u) {
          if (!kUnmasked) AdjustScores<T>(k, segment, rotated, page, u, lane, score);
        },
        state, sums);
    ring.Release(k);
    if (page + worker.warps < segment.end) ring.Fill(k);
  }
  return page;
}

// Subtracts from the accumulators the contribution of the codes' mean, which is 1.5 times the sum
// of weights. Tensor cores truncate sums towards zero, and the largest sums lose most; codes are 0
// to 3, so an accumulator grows with every token unless this is called every kLevelPages pages.
template <class T>
__device__ __forceinline__ void Level(SegmentState<T>& state, Int2Sums<T>& sums) {
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
        const float unit = PowerOfTwo(OutputShift(m, e / 2) - 24);
        float& x = state.out[n][m][e];
        x = fmaf(sums.rounded[m * T::kGroups / T::kSteps][n][e], -unit, x);
      }
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) sums.rounded[y][n][e] = 0.0f;
    }
  }
}

// Attends this warp's pages of a segment. Leaves outputs in real units in `state`. The slot of the
// last tile is released but not filled again.
template <class T, class Ring>
__device__ __forceinline__ void AttendInt2(const DecodeKernelParams& k, const Segment& segment,
                                           const RotatedQuery& rotated, const Worker& worker,
                                           Ring& ring, SegmentState<T>& state) {
  const int lane = threadIdx.x % 32;
  Int2Query<T> query;
  LoadQuery<T>(k, rotated, lane, &query);
  Int2Sums<T> sums;
  const bool unmasked = !HasSoftCap<T>(k) && !HasSlidingWindow<T>(k);
  int page = segment.begin + worker.warp;
  RowBiases<T> biases(k, segment, page, worker.warps, lane);
  int biases_end = page, level_end = page + T::kLevelPages * worker.warps;
  while (page < segment.end) {
    if (page >= level_end) {
      Level<T>(state, sums);
      level_end += T::kLevelPages * worker.warps;
    }
    if (page >= biases_end) biases_end = biases.Set(k, page, query.bias);
    const int end = min(biases_end, level_end);
    page = unmasked ? AttendPages<T, true>(k, segment, rotated, worker, page, end, query, ring,
                                           state, sums)
                    : AttendPages<T, false>(k, segment, rotated, worker, page, end, query, ring,
                                            state, sums);
  }
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) sums.middle[y][i] = SumOverTokens(sums.middle[y][i]);
  }
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float unit = PowerOfTwo(24 - OutputShift(m, e / 2));
        const int y = m * T::kGroups / T::kSteps;
        // The first of two interleaved columns takes the middle; the output is their sum.
        const float middle =
            T::Interleaved(n) && e % 2 != 0 ? 0.0f : sums.middle[y][(2 * n + e % 2) % T::kLaneRows];
        const float add = middle - sums.rounded[y][n][e];
        state.out[n][m][e] = fmaf(state.out[n][m][e], unit, add);
      }
    }
  }
}

}  // namespace crumb::kernels::cuda
