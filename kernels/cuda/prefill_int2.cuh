// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill_traits.cuh"

// A warp's columns over INT2 page tiles, 32 tokens at a time. Codes become operands by masking; a
// row's scale and minimum enter where its scores and probabilities are.
namespace crumb::kernels::cuda::prefill {

// The block's tiles in shared memory, some ahead of the warps that read them. Every thread of the
// block makes the same calls.
template <class T>
class TileStream {
 public:
  __device__ __forceinline__ TileStream(const PrefillAttentionParams& p, const Block<T>& block,
                                        int begin, Shared<T>& shared)
      : p_(p),
        block_(block),
        shared_(shared),
        begin_(begin),
        next_(begin),
        fill_(0),
        use_(0),
        address_(0) {
    for (int i = 0; i < T::kLead; ++i) Fill();
  }

  // Waits for the next tile, which stays until the next call; asks for one more.
  __device__ __forceinline__ const char* Next() {
    ptx::WaitCopies<T::kLead - 1>();
    __syncthreads();
    Fill();
    const char* tile = shared_.tiles[use_];
    if (++use_ == T::kStages) use_ = 0;
    return tile;
  }

 private:
  __device__ __forceinline__ void Fill() {
    if (next_ < block_.pages) {
      const char* from = reinterpret_cast<const char*>(Tile());
      char* to = shared_.tiles[fill_];
      for (int at = 16 * threadIdx.x; at < T::kTileBytes; at += 16 * T::kThreads) {
        ptx::CopyAsync16(ptx::SharedAddress(to + at), from + at);
      }
      ++next_;
      if (++fill_ == T::kStages) fill_ = 0;
    }
    ptx::CommitCopies();
  }

  // Each lane keeps the address of one of the next 32 tiles.
  __device__ __forceinline__ uint64_t Tile() {
    const int index = (next_ - begin_) % 32, page = next_ + static_cast<int>(threadIdx.x % 32);
    if (index == 0 && page < block_.pages) {
      address_ =
          p_.page_address[static_cast<int64_t>(block_.sequence) * p_.shape.max_pages + page] +
          p_.page_layer_offset + block_.head * p_.page_head_stride;
    }
    return __shfl_sync(~0u, address_, index);
  }

  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  Shared<T>& shared_;
  const int begin_;
  int next_;  // page to ask for
  int fill_, use_;
  uint64_t address_;
};

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

// Scale and minimum words of tokens r + 8 a of group u (element 0, 1) and u + 1 (2, 3).
template <class T>
__device__ __forceinline__ uint4 LoadMeta(const char* meta, int group, int u, int lane) {
  return *reinterpret_cast<const uint4*>(meta + 4 * T::kTokens * group + 32 * (lane / 4) + 8 * u);
}

template <class T>
using Scores = float[2][T::kColumnTiles][4];  // element 2 a + e: token r + 8 a, column 2 c + e

// Sums of code * q' over one quantization group's channels, of 32 tokens from group u on.
template <class T>
__device__ __forceinline__ void MultiplyCodes(const Shared<T>& shared, int warp, int lane,
                                              const uint32_t (&w)[2][T::kWords], int group,
                                              Scores<T>& acc) {
#pragma unroll
  for (int s = group * T::kStepsPerGroup; s < (group + 1) * T::kStepsPerGroup; s += 2) {
    uint4 q[T::kColumnTiles];
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) q[n] = shared.query[warp][n][s / 2][lane];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * ((s + half) / 4), j = 2 * ((s + half) % 4);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const uint32_t a0 = CodePair(w[v][i], j), a1 = CodePair(w[v][i + 1], j);
        const uint32_t a2 = CodePair(w[v][i], j + 1), a3 = CodePair(w[v][i + 1], j + 1);
#pragma unroll
        for (int n = 0; n < T::kColumnTiles; ++n) {
          ptx::MmaF16(acc[v][n], a0, a1, a2, a3, half == 0 ? q[n].x : q[n].z,
                      half == 0 ? q[n].y : q[n].w);
        }
      }
    }
  }
}

// Logits of 32 tokens minus each column's reference (kPlain) or as they are, log2 units.
template <class T, bool kPlain>
__device__ __forceinline__ void Score(const Shared<T>& shared, int warp, int lane, const char* tile,
                                      int u, float factor, const State<T>& state, Scores<T>& t) {
  uint32_t w[2][T::kWords];
#pragma unroll
  for (int v = 0; v < 2; ++v) LoadWords<T>(tile, u + v, lane, w[v]);
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    Scores<T> acc;
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const uint4 x =
            ptx::LoadShared128(ptx::SharedAddress(&shared.query_rest[warp][y][4 * n + lane % 4]));
        acc[v][n][0] = __uint_as_float(x.x), acc[v][n][1] = __uint_as_float(x.y);
        acc[v][n][2] = __uint_as_float(x.z), acc[v][n][3] = __uint_as_float(x.w);
      }
    }
    MultiplyCodes<T>(shared, warp, lane, w, y, acc);
    const uint4 meta = LoadMeta<T>(tile + 2 * T::kCodeBytes, y, u, lane);
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) {
      const float2 sum =
          *reinterpret_cast<const float2*>(&shared.query_sum[warp][y][8 * n + 2 * (lane % 4)]);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          const uint32_t word = v == 0 ? (a == 0 ? meta.x : meta.y) : (a == 0 ? meta.z : meta.w);
          const float scale = ptx::LowHalf(word) * factor, minimum = ptx::HighHalf(word);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float rest = y > 0    ? t[v][n][2 * a + e]
                               : kPlain ? -state.reference[2 * n + e]
                                        : 0.0f;
            t[v][n][2 * a + e] =
                fmaf(acc[v][n][2 * a + e], scale, fmaf(e == 0 ? sum.x : sum.y, minimum, rest));
          }
        }
      }
    }
  }
}

// Sums beside the common state.
template <class T>
struct PageSums {
  // Of p * v_min, this lane's tokens, and what Level has taken out of the accumulators.
  float minimum[T::kGroups][T::kLaneColumns] = {};
};

// Products add codes of 0 to 3 and cut their sums towards zero; over a long context that is a bias
// larger than an average of values with mixed signs. So what the sums grow by, about 1.5 v_scale p,
// is taken out of the accumulators now and then and kept beside them, with what is no product. The
// estimate is the same in all lanes of a column.
template <class T>
__device__ __forceinline__ void Level(const char* tile, int lane, Shared<T>& shared,
                                      State<T>& state, PageSums<T>& sums) {
  float middle[T::kGroups];
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    float total = 0.0f;
#pragma unroll
    for (int u = 0; u < T::kTokens / 16; u += 2) {
      const uint4 meta = LoadMeta<T>(tile + 2 * T::kCodeBytes + T::kMetaBytes, y, u, lane);
      total +=
          ptx::LowHalf(meta.x) + ptx::LowHalf(meta.y) + ptx::LowHalf(meta.z) + ptx::LowHalf(meta.w);
    }
    middle[y] = SumOverRows(total) * (1.5f / T::kTokens);
  }
#pragma unroll
  for (int i = 0; i < T::kLaneColumns; ++i) {
    const float mass = SumOverRows(state.sum[i]);
    shared.held_sum[i][threadIdx.x] += state.sum[i];
    state.sum[i] = 0.0f;
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      const float part = mass * middle[y];
      sums.minimum[y][i] += 0.125f * part;  // of 8 lanes
#pragma unroll
      for (int m = y * T::kStepsPerGroup; m < (y + 1) * T::kStepsPerGroup; ++m) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          float& x = state.out[i / 2][m][2 * a + i % 2];
          x = fmaf(part, -PowerOfTwo(CodeShift(2 * (m % 4) + a) - 24), x);
        }
      }
    }
  }
}

// Follows larger logits: shifts `t`, which is relative to the references, along with them.
template <class T, int kHalves>
__device__ __forceinline__ void Follow(State<T>& state, const float (&best)[T::kLaneColumns],
                                       uint32_t scale_most, float (&t)[kHalves][T::kColumnTiles][4],
                                       PageSums<T>* sums, float* held_sum) {
  float moved[T::kLaneColumns], factor[T::kLaneColumns];
  state.Move(best, scale_most, moved, factor);
#pragma unroll
  for (int i = 0; i < T::kLaneColumns; ++i) {
#pragma unroll
    for (int v = 0; v < kHalves; ++v) {
      t[v][i / 2][i % 2] -= moved[i];
      t[v][i / 2][2 + i % 2] -= moved[i];
    }
    if (sums != nullptr) {
      held_sum[i * T::kThreads + threadIdx.x] *= factor[i];
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) sums->minimum[y][i] *= factor[i];
    }
  }
}

template <class T, int kHalves>
__device__ __forceinline__ void LargestLogits(const float (&t)[kHalves][T::kColumnTiles][4],
                                              float (&best)[T::kLaneColumns]) {
#pragma unroll
  for (int i = 0; i < T::kLaneColumns; ++i) {
    best[i] = fmaxf(t[0][i / 2][i % 2], t[0][i / 2][2 + i % 2]);
#pragma unroll
    for (int v = 1; v < kHalves; ++v) {
      best[i] = fmaxf(best[i], fmaxf(t[v][i / 2][i % 2], t[v][i / 2][2 + i % 2]));
    }
  }
}

// Probabilities of 32 tokens, then their values.
template <class T>
__device__ __forceinline__ void AddValues(const char* tile, int u, int lane, bool level,
                                          Shared<T>& shared, Scores<T>& t, State<T>& state,
                                          PageSums<T>& sums) {
  const char* meta_at = tile + 2 * T::kCodeBytes + T::kMetaBytes;
  uint4 meta[T::kGroups];
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) meta[y] = LoadMeta<T>(meta_at, y, u, lane);
  float best[T::kLaneColumns];
  LargestLogits<T, 2>(t, best);
  uint32_t scale_most = 0;
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    scale_most = __vmaxu2(scale_most,
                          __vmaxu2(__vmaxu2(meta[y].x, meta[y].y), __vmaxu2(meta[y].z, meta[y].w)));
  }
  scale_most &= 0xffff;
  const bool moves = level || scale_most > state.scale_bound || state.MustMove(best);
  if (__any_sync(~0u, moves)) {
    Follow<T, 2>(state, best, scale_most, t, &sums, shared.held_sum[0]);
    if (level) Level<T>(tile, lane, shared, state, sums);
  }

#pragma unroll
  for (int v = 0; v < 2; ++v) {
    uint32_t b[T::kGroups][T::kColumnTiles][2];
#pragma unroll
    for (int a = 0; a < 2; ++a) {
#pragma unroll
      for (int n = 0; n < T::kColumnTiles; ++n) {
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
          const float scale = ptx::LowHalf(word), minimum = ptx::HighHalf(word);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            sums.minimum[y][2 * n + e] = fmaf(p[e], minimum, sums.minimum[y][2 * n + e]);
          }
          b[y][n][a] = ptx::TransposeMatrix(ptx::PackHalf(p[0] * scale, p[1] * scale));
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
      for (int n = 0; n < T::kColumnTiles; ++n) {
        ptx::MmaF16(state.out[n][m], a0, a1, a2, a3, b[y][n][0], b[y][n][1]);
      }
    }
  }
}

// Logits of pages with caps or a window: adds what INT2 logits have beside the product, masks.
template <class T>
__device__ __forceinline__ void AdjustScores(const PrefillAttentionParams& p, const Block<T>& block,
                                             const Shared<T>& shared, int warp, int lane, int page,
                                             int u, const State<T>& state, Scores<T>& t) {
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * n + 2 * (lane % 4) + e;
      const int first = block.FirstPosition(p, shared.token[warp][column]);
      const float bias = shared.bias[warp][column];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          float& x = t[v][n][2 * a + e];
          if (p.soft_cap > 0.0f) {
            const int row = shared.row[warp][column];
            const float shift =
                p.shift != nullptr && row >= 0 ? p.shift[row % p.shape.q_heads] * kLog2E : 0.0f;
            // The bias holds -shift; the cap goes between.
            x = SoftCap((x + bias + shift) * kLn2, p.soft_cap) * kLog2E - shift;
          } else {
            x += bias;
          }
          x -= state.reference[2 * n + e];
          const int position = block.sink + T::kTokens * page + 16 * (u + v) + 8 * a + lane / 4;
          if (position < first) x = -INFINITY;
        }
      }
    }
  }
}

// Which position block the columns' biases are for; -1: none yet.
template <class T>
__device__ __forceinline__ void SetBias(const PrefillAttentionParams& p, const Block<T>& block,
                                        int page, bool keep_in_reference, Shared<T>& shared,
                                        int warp, int lane, State<T>& state, int* position_block) {
  if (p.offset == nullptr && p.shift == nullptr) return;
  const int wanted =
      p.offset != nullptr ? min(page / p.pages_per_position_block, p.position_blocks - 1) : 0;
  if (wanted == *position_block) return;
  *position_block = wanted;
  float old[T::kLaneColumns];
#pragma unroll
  for (int i = 0; i < T::kLaneColumns; ++i) {
    old[i] = shared.bias[warp][8 * (i / 2) + 2 * (lane % 4) + i % 2];
  }
  __syncwarp();
  for (int column = lane; column < T::kColumns; column += 32) {
    const int row = shared.row[warp][column];
    float bias = 0.0f;
    if (row >= 0 && p.offset != nullptr) {
      bias = p.offset[static_cast<int64_t>(row) * p.position_blocks + wanted] * block.scale;
    }
    if (row >= 0 && p.shift != nullptr) bias -= p.shift[row % p.shape.q_heads];
    shared.bias[warp][column] = bias * kLog2E;
  }
  __syncwarp();
  if (!keep_in_reference) return;
#pragma unroll
  for (int i = 0; i < T::kLaneColumns; ++i) {
    state.reference[i] += old[i] - shared.bias[warp][8 * (i / 2) + 2 * (lane % 4) + i % 2];
  }
}

// All pages of the block's sequence from `begin` on. kPlain: no caps, no window; a bias is kept in
// the references then. Leaves outputs in real units. Warps without columns only help to copy.
template <class T, bool kPlain>
__device__ __forceinline__ void AttendPages(const PrefillAttentionParams& p, const Block<T>& block,
                                            int begin, float factor, Shared<T>& shared, int warp,
                                            int lane, State<T>& state) {
  const bool active = warp * T::kColumns < block.columns;
  TileStream<T> stream(p, block, begin, shared);
  PageSums<T> sums;
#pragma unroll
  for (int i = 0; i < T::kLaneColumns; ++i) shared.held_sum[i][threadIdx.x] = 0.0f;
  int position_block = -1;
  for (int page = begin; page < block.pages; ++page) {
    if (active) {
      SetBias<T>(p, block, page, kPlain, shared, warp, lane, state, &position_block);
    }
    const char* tile = stream.Next();
    if (!active) continue;
    const bool level = (page - begin) % T::kLevelPages == T::kLevelPages - 1;
#pragma unroll 1
    for (int u = 0; u < T::kTokens / 16; u += 2) {
      Scores<T> t;
      Score<T, kPlain>(shared, warp, lane, tile, u, factor, state, t);
      if constexpr (!kPlain) {
        AdjustScores<T>(p, block, shared, warp, lane, page, u, state, t);
      }
      AddValues<T>(tile, u, lane, level && u == 0, shared, t, state, sums);
    }
  }
  ptx::WaitCopies<0>();
  if (!active) return;
#pragma unroll
  for (int i = 0; i < T::kLaneColumns; ++i) {
    if (kPlain) state.reference[i] += shared.bias[warp][8 * (i / 2) + 2 * (lane % 4) + i % 2];
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) sums.minimum[y][i] = SumOverRows(sums.minimum[y][i]);
    state.sum[i] += shared.held_sum[i][threadIdx.x];
    const float mass = SumOverRows(state.sum[i]);
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        float& x = state.out[i / 2][m][2 * a + i % 2];
        x = fmaf(x, PowerOfTwo(24 - CodeShift(2 * (m % 4) + a)),
                 sums.minimum[m / T::kStepsPerGroup][i]);
        if (p.mean_v != nullptr) {
          x = fmaf(mass, p.mean_v[block.head * T::kDim + 16 * m + 8 * a + lane / 4], x);
        }
      }
    }
  }
}

}  // namespace crumb::kernels::cuda::prefill
