// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/tile_stream.cuh"
#include "kernels/cuda/prefill/traits.cuh"

// Attention of a warp's query rows over INT2 page tiles by mma.sync, 32 tokens at a time. Codes
// become operands by masking; a row's scale and minimum are applied to scores and probabilities
// (docs/kernels/prefill.md).
namespace crumb::kernels::cuda::prefill {

template <class T>
__device__ __forceinline__ void LoadWords(const char* codes, int u, int lane,
                                          uint32_t (&w)[T::kWords]) {
#pragma unroll
  for (int i = 0; i < T::kWords; i += T::kWide) {
    const char* at = codes + 4 * T::kDim * u + 128 * i + 4 * T::kWide * lane;
    if constexpr (T::kWide == 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(at);
      w[i] = x.x, w[i + 1] = x.y;
    }
  }
}

// Returns the words (scale, minimum) of tokens r + 8 a of group u (elements 0, 1) and u + 1 (2, 3).
template <class T>
__device__ __forceinline__ uint4 LoadMeta(const char* meta, int group, int u, int lane) {
  return *reinterpret_cast<const uint4*>(meta + 4 * T::kTokens * group + 32 * (lane / 4) + 8 * u);
}

template <class T>
using Scores = float[2][T::kQueryTiles][4];  // element 2 a + e: token r + 8 a, query row 2 c + e

// Masks the codes of 16 tokens in one half of 64 channels as an MMA operand of bytes. A half is
// every other eight channels or, with groups of 32 channels, the lower or the upper 32.
template <class T>
__device__ __forceinline__ void CodeBytes(const uint32_t (&w)[T::kWords], int part, int half,
                                          uint32_t (&a)[4]) {
  constexpr uint32_t kCodes = 0x03030303u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = w[2 * part + i];
    if constexpr (T::kStepsPerGroup > 2) {
      // A byte of word >> 4 b is a code of eight 2 b + half, or of the eight 4 further on.
      a[i] = (word >> (2 * half)) & kCodes;
      a[2 + i] = (word >> (2 * half + 4)) & kCodes;
    } else {
      // Eights 4 half to 4 half + 3 lie in every other byte.
      const uint32_t four = (word >> (8 * half)) & 0x00ff00ffu;
      a[i] = (four | four << 6) & kCodes;
      a[2 + i] = (four >> 4 | four << 2) & kCodes;
    }
  }
}

// Adds code * q' over the channels of group `y`, with the high or the low bytes of q', for 32
// tokens from group u on.
template <class T>
__device__ __forceinline__ void MultiplyCodes(const Shared<T>& shared, int warp, int lane,
                                              const uint32_t (&w)[2][T::kWords], int y, int byte,
                                              int (&acc)[2][T::kQueryTiles][4]) {
  constexpr int kHalves = T::kStepsPerGroup / 2;
#pragma unroll
  for (int part = y * kHalves / 2; part < (y * kHalves + kHalves + 1) / 2; ++part) {
    uint4 q[T::kQueryTiles];
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) q[n] = shared.query[warp][n][2 * part + byte][lane];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kHalves == 1 && half != y % 2) continue;
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        uint32_t a[4];
        CodeBytes<T>(w[v], part, half, a);
#pragma unroll
        for (int n = 0; n < T::kQueryTiles; ++n) {
          ptx::MmaU8S8(acc[v][n], a[0], a[1], a[2], a[3], half == 0 ? q[n].x : q[n].z,
                       half == 0 ? q[n].y : q[n].w);
        }
      }
    }
  }
}

// Computes the logits of 32 tokens in log2 units, minus each query row's running max if kFastPath.
// The MMAs are exact, and codes are taken relative to their middle, 1.5.
template <class T, bool kFastPath>
__device__ __forceinline__ void Score(const Shared<T>& shared, int warp, int lane, const char* tile,
                                      int u, const State<T>& state, Scores<T>& t) {
  uint32_t w[2][T::kWords];
#pragma unroll
  for (int v = 0; v < 2; ++v) LoadWords<T>(tile, u + v, lane, w[v]);
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    int acc[2][T::kQueryTiles][4] = {};
    MultiplyCodes<T>(shared, warp, lane, w, y, 0, acc);
    float2 sum[T::kQueryTiles];
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
      const uint4 terms =
          ptx::LoadShared128(ptx::SharedAddress(&shared.query_terms[warp][y][4 * n + lane % 4]));
      sum[n] = make_float2(__uint_as_float(terms.z), __uint_as_float(terms.w));
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[v][n][i] = acc[v][n][i] * 256 + static_cast<int>(i % 2 == 0 ? terms.x : terms.y);
        }
      }
    }
    MultiplyCodes<T>(shared, warp, lane, w, y, 1, acc);
    const uint4 meta = LoadMeta<T>(tile + 2 * T::kCodeBytes, y, u, lane);
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
      const uint4 unit =
          ptx::LoadShared128(ptx::SharedAddress(&shared.query_unit[warp][4 * n + lane % 4]));
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          const uint32_t word = v == 0 ? (a == 0 ? meta.x : meta.y) : (a == 0 ? meta.z : meta.w);
          const float scale = ptx::LowHalf(word), middle = fmaf(1.5f, scale, ptx::HighHalf(word));
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float rest = y > 0       ? t[v][n][2 * a + e]
                               : kFastPath ? -state.running_max[2 * n + e]
                                           : 0.0f;
            const float dot = fmaf(__int_as_float(acc[v][n][2 * a + e]),
                                   __uint_as_float(e == 0 ? unit.x : unit.y),
                                   __uint_as_float(e == 0 ? unit.z : unit.w));
            t[v][n][2 * a + e] = fmaf(dot, scale, fmaf(e == 0 ? sum[n].x : sum[n].y, middle, rest));
          }
        }
      }
    }
  }
}

// Sums in addition to State.
template <class T>
struct PageSums {
  // Sum of p * v_min over this lane's tokens, plus 1.5 times the rounding of p * v_scale: rounded
  // numbers are thereby multiplied by codes between -1.5 and 1.5.
  float beside[T::kGroups][T::kLaneQueryRows] = {};
};

// Accumulators in local memory, in real units. Tensor cores truncate sums towards zero. Sums of
// codes, which are 0 to 3, lose more over a long context than the average of values with mixed
// signs, and after one large key later small contributions are lost. Every kHoldPages pages all
// sums are therefore added to these copies.
template <class T>
class HeldSums {
 public:
  // Adds the sums of the state to the copies and clears the accumulators.
  __device__ __forceinline__ void Take(Shared<T>& shared, State<T>& state, PageSums<T>& sums) {
    float4* at = Sums();
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
      float old[2];  // factors
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 2 * n + e;
        float& sum = shared.held_sum[i][threadIdx.x];
        old[e] = shared.held_factor[i][threadIdx.x];
        shared.held_factor[i][threadIdx.x] = 1.0f;
        sum = fmaf(sum, old[e], state.sum[i]);
        state.sum[i] = 0.0f;
      }
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
        float(&beside)[T::kLaneQueryRows] = sums.beside[y];
        const float even = SumOverRows(beside[2 * n]), odd = SumOverRows(beside[2 * n + 1]);
        beside[2 * n] = beside[2 * n + 1] = 0.0f;
#pragma unroll
        for (int m = y * T::kStepsPerGroup; m < (y + 1) * T::kStepsPerGroup; ++m) {
          float(&out)[4] = state.out[n][m];
          const float first = PowerOfTwo(24 - CodeShift(2 * (m % 4)));
          const float second = PowerOfTwo(24 - CodeShift(2 * (m % 4) + 1));
          float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (any_) x = at[n * T::kSteps + m];
          x.x = fmaf(x.x, old[0], fmaf(out[0], first, even));
          x.y = fmaf(x.y, old[1], fmaf(out[1], first, odd));
          x.z = fmaf(x.z, old[0], fmaf(out[2], second, even));
          x.w = fmaf(x.w, old[1], fmaf(out[3], second, odd));
          at[n * T::kSteps + m] = x;
          out[0] = out[1] = out[2] = out[3] = 0.0f;
        }
      }
    }
    any_ = true;
  }

  // Multiplies the copies by a factor for each query row, deferred until Take.
  __device__ __forceinline__ void Scale(const float (&factor)[T::kLaneQueryRows],
                                        Shared<T>& shared) {
#pragma unroll
    for (int i = 0; i < T::kLaneQueryRows; ++i) shared.held_factor[i][threadIdx.x] *= factor[i];
  }

  // Moves the copies back to the state.
  __device__ __forceinline__ void Return(const Shared<T>& shared, State<T>& state) {
    const float4* at = Sums();
#pragma unroll
    for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
      for (int m = 0; m < T::kSteps; ++m) {
        const float4 x = at[n * T::kSteps + m];
        state.out[n][m][0] = x.x, state.out[n][m][1] = x.y;
        state.out[n][m][2] = x.z, state.out[n][m][3] = x.w;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) state.sum[2 * n + e] = shared.held_sum[2 * n + e][threadIdx.x];
    }
  }

 private:
  // The empty asm forces the compiler to keep the copies in memory.
  __device__ __forceinline__ float4* Sums() {
    float4* at = sums_;
    asm volatile("" : "+l"(at)::"memory");
    return at;
  }

  float4 sums_[T::kQueryTiles * T::kSteps];
  bool any_ = false;
};

// Raises the running max for larger logits and shifts `t`, which is relative to it, accordingly.
template <class T, int kHalves>
__device__ __forceinline__ void Follow(State<T>& state, const float (&best)[T::kLaneQueryRows],
                                       uint32_t scale_most, float (&t)[kHalves][T::kQueryTiles][4],
                                       float (&factor)[T::kLaneQueryRows]) {
  float moved[T::kLaneQueryRows];
  state.Move(best, scale_most, moved, factor);
#pragma unroll
  for (int i = 0; i < T::kLaneQueryRows; ++i) {
#pragma unroll
    for (int v = 0; v < kHalves; ++v) {
      t[v][i / 2][i % 2] -= moved[i];
      t[v][i / 2][2 + i % 2] -= moved[i];
    }
  }
}

template <class T, int kHalves>
__device__ __forceinline__ void LargestLogits(const float (&t)[kHalves][T::kQueryTiles][4],
                                              float (&best)[T::kLaneQueryRows]) {
#pragma unroll
  for (int i = 0; i < T::kLaneQueryRows; ++i) {
    best[i] = fmaxf(t[0][i / 2][i % 2], t[0][i / 2][2 + i % 2]);
#pragma unroll
    for (int v = 1; v < kHalves; ++v) {
      best[i] = fmaxf(best[i], fmaxf(t[v][i / 2][i % 2], t[v][i / 2][2 + i % 2]));
    }
  }
}

// Turns the logits of 32 tokens into probabilities and adds their values.
template <class T>
__device__ __forceinline__ void AddValues(const char* tile, int u, int lane, Shared<T>& shared,
                                          Scores<T>& t, State<T>& state, PageSums<T>& sums,
                                          HeldSums<T>& held) {
  const char* meta_at = tile + 2 * T::kCodeBytes + T::kMetaBytes;
  uint4 meta[T::kGroups];
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) meta[y] = LoadMeta<T>(meta_at, y, u, lane);
  uint32_t scale_most = 0;
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    scale_most = __vmaxu2(scale_most,
                          __vmaxu2(__vmaxu2(meta[y].x, meta[y].y), __vmaxu2(meta[y].z, meta[y].w)));
  }
  scale_most &= 0xffff;
  const bool looks = scale_most > state.scale_bound || state.MayMove(t);
  if (__any_sync(~0u, looks)) {
    float best[T::kLaneQueryRows];
    LargestLogits<T, 2>(t, best);
    if (__any_sync(~0u, scale_most > state.scale_bound || state.MustMove(best))) {
      float factor[T::kLaneQueryRows];
      Follow<T, 2>(state, best, scale_most, t, factor);
#pragma unroll
      for (int i = 0; i < T::kLaneQueryRows; ++i) {
#pragma unroll
        for (int y = 0; y < T::kGroups; ++y) sums.beside[y][i] *= factor[i];
      }
      held.Scale(factor, shared);
    }
  }

#pragma unroll
  for (int v = 0; v < 2; ++v) {
    uint32_t b[T::kGroups][T::kQueryTiles][2];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
#pragma unroll
      for (int n = 0; n < T::kQueryTiles; ++n) {
        float p[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          p[e] = ptx::Exp2(t[v][n][2 * a + e]);
          state.sum[2 * n + e] += p[e];
        }
#pragma unroll
        for (int y = 0; y < T::kGroups; ++y) {
          const uint32_t word =
              v == 0 ? (a == 0 ? meta[y].x : meta[y].y) : (a == 0 ? meta[y].z : meta[y].w);
          const float scale = ptx::LowHalf(word), middle = fmaf(1.5f, scale, ptx::HighHalf(word));
          const uint32_t weights = ptx::PackHalf(p[0] * scale, p[1] * scale);
          float* beside = &sums.beside[y][2 * n];
          beside[0] = fmaf(-1.5f, ptx::LowHalf(weights), fmaf(p[0], middle, beside[0]));
          beside[1] = fmaf(-1.5f, ptx::HighHalf(weights), fmaf(p[1], middle, beside[1]));
          b[y][n][a] = ptx::TransposeMatrix(weights);
        }
      }
    }
    uint32_t w[T::kWords];
    LoadWords<T>(tile + T::kCodeBytes, u + v, lane, w);
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
      const int i = 2 * (m / 4), j = 2 * (m % 4), y = m / T::kStepsPerGroup;
      const uint32_t a0 = CodePair(w[i], j), a1 = CodePair(w[i], j + 1);
      const uint32_t a2 = CodePair(w[i + 1], j), a3 = CodePair(w[i + 1], j + 1);
#pragma unroll
      for (int n = 0; n < T::kQueryTiles; ++n) {
        ptx::MmaF16(state.out[n][m], a0, a1, a2, a3, b[y][n][0], b[y][n][1]);
      }
    }
  }
}

// Finishes logits with a soft cap or a sliding window: adds bias, caps and masks.
template <class T>
__device__ __forceinline__ void AdjustScores(const PrefillAttentionParams& p, const Block<T>& block,
                                             const Shared<T>& shared, int warp, int lane, int page,
                                             int u, const State<T>& state, Scores<T>& t) {
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query_row = 8 * n + 2 * (lane % 4) + e;
      const int first = block.FirstPosition(p, shared.token[warp][query_row]);
      const float bias = shared.bias[warp][query_row];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          float& x = t[v][n][2 * a + e];
          if (p.soft_cap > 0.0f) {
            const int row = shared.row[warp][query_row];
            const float shift =
                p.shift != nullptr && row >= 0 ? p.shift[row % p.shape.q_heads] * kLog2E : 0.0f;
            // The bias contains -shift, which applies after the cap.
            x = SoftCap((x + bias + shift) * kLn2, p.soft_cap) * kLog2E - shift;
          } else {
            x += bias;
          }
          x -= state.running_max[2 * n + e];
          const int position = block.sink + T::kTokens * page + 16 * (u + v) + 8 * a + lane / 4;
          if (position < first) x = -INFINITY;
        }
      }
    }
  }
}

// Updates the biases of the query rows if `page` is in another position block than *position_block
// (-1: none yet). `keep_in_running_max`: also moves the change of the bias into the running max.
template <class T>
__device__ __forceinline__ void SetBias(const PrefillAttentionParams& p, const Block<T>& block,
                                        int page, bool keep_in_running_max, Shared<T>& shared,
                                        int warp, int lane, State<T>& state, int* position_block) {
  if (p.offset == nullptr && p.shift == nullptr) return;
  const int wanted =
      p.offset != nullptr ? min(page / p.pages_per_position_block, p.position_blocks - 1) : 0;
  if (wanted == *position_block) return;
  *position_block = wanted;
  float old[T::kLaneQueryRows];
#pragma unroll
  for (int i = 0; i < T::kLaneQueryRows; ++i) {
    old[i] = shared.bias[warp][8 * (i / 2) + 2 * (lane % 4) + i % 2];
  }
  __syncwarp();
  for (int query_row = lane; query_row < T::kQueryRows; query_row += 32) {
    const int row = shared.row[warp][query_row];
    float bias = 0.0f;
    if (row >= 0 && p.offset != nullptr) {
      bias = p.offset[static_cast<int64_t>(row) * p.position_blocks + wanted] * block.scale;
    }
    if (row >= 0 && p.shift != nullptr) bias -= p.shift[row % p.shape.q_heads];
    shared.bias[warp][query_row] = bias * kLog2E;
  }
  __syncwarp();
  if (!keep_in_running_max) return;
#pragma unroll
  for (int i = 0; i < T::kLaneQueryRows; ++i) {
    state.running_max[i] += old[i] - shared.bias[warp][8 * (i / 2) + 2 * (lane % 4) + i % 2];
  }
}

// Attends all pages of the block's sequence from `begin` on. kFastPath: without soft cap and
// sliding window; the bias is then contained in the running max. Leaves outputs in real units.
// Warps without query rows only help to copy.
template <class T, bool kFastPath>
__device__ __forceinline__ void AttendPages(const PrefillAttentionParams& p, const Block<T>& block,
                                            int begin, Shared<T>& shared, int warp, int lane,
                                            State<T>& state) {
  const bool active = warp * T::kQueryRows < block.query_rows;
  TileStream<T> stream(p, block, begin, shared);
  PageSums<T> sums;
  HeldSums<T> held;
#pragma unroll
  for (int i = 0; i < T::kLaneQueryRows; ++i) {
    shared.held_sum[i][threadIdx.x] = 0.0f;
    shared.held_factor[i][threadIdx.x] = 1.0f;
  }
  int position_block = -1;
  for (int page = begin; page < block.pages; ++page) {
    if (active) {
      SetBias<T>(p, block, page, kFastPath, shared, warp, lane, state, &position_block);
    }
    const char* tile = stream.Next();
    if (!active) continue;
#pragma unroll 1
    for (int u = 0; u < T::kTokens / 16; u += 2) {
      Scores<T> t;
      Score<T, kFastPath>(shared, warp, lane, tile, u, state, t);
      if constexpr (!kFastPath) {
        AdjustScores<T>(p, block, shared, warp, lane, page, u, state, t);
      }
      AddValues<T>(tile, u, lane, shared, t, state, sums, held);
    }
    if ((page - begin) % T::kHoldPages == T::kHoldPages - 1) held.Take(shared, state, sums);
  }
  ptx::WaitCopies<0>();
  if (!active) return;
  held.Take(shared, state, sums);
  held.Return(shared, state);
#pragma unroll
  for (int i = 0; i < T::kLaneQueryRows; ++i) {
    if (kFastPath) state.running_max[i] += shared.bias[warp][8 * (i / 2) + 2 * (lane % 4) + i % 2];
    if (p.mean_v == nullptr) continue;
    const float mass = SumOverRows(state.sum[i]);
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        float& x = state.out[i / 2][m][2 * a + i % 2];
        x = fmaf(mass, p.mean_v[block.head * T::kDim + 16 * m + 8 * a + lane / 4], x);
      }
    }
  }
}

}  // namespace crumb::kernels::cuda::prefill
