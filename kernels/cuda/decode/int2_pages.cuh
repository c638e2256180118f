// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/code_pairs.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/decode/traits.cuh"

// Attention of a few query rows over INT2 page tiles, one warp. Tokens are the rows of the score
// product, channels the rows of the value product, query rows the columns of both, so codes go
// from shared memory to the tensor cores by masking alone. docs/kernels/decode.md has the account.
namespace crumb::kernels::cuda {

// The shift left in output register pair `a` (channel 16 m + 8 a + r) of channel tile m.
__host__ __device__ constexpr int OutputShift(int m, int a) { return CodeShift(2 * (m % 4) + a); }

// What a lane knows of its query rows.
template <class T>
struct Int2Query {
  uint32_t fragment[T::kDotTiles][T::kDotSteps][2];  // q' in bytes
  float sum[T::kGroups][T::kLaneRows];               // of q', in raw score units
  float factor[T::kLaneRows];                        // raw score -> log2 units; 1 with a soft cap
  float bias[T::kLaneRows];  // added to the logit, log2 units; 0 with a soft cap
};

// Sums over a segment beside the common state.
template <class T>
struct Int2Sums {
  // Values are split around their rows' middle, v_min + 1.5 v_scale, so that what rounding p *
  // v_scale to fp16 does is multiplied by codes between -1.5 and 1.5 only.
  float middle[T::kGroups][T::kLaneRows] = {};         // of p * middle, this lane's tokens
  float rounded[T::kGroups][T::kColumnTiles][4] = {};  // 1.5 * sum of rounded p * v_scale
  float headroom = 0.0f;     // p reaches 2^headroom at the maximum: fills fp16's range
  uint32_t scale_bound = 0;  // fp16 bits of the largest v_scale headroom was made for
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

// Scale and minimum (one word) of the tokens r + 8 a + 16 (first + u) of this lane, index 2 u + a.
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

// Raw scores of kTogether groups of 16 tokens from group `first` on, to score[to] and on: token
// r + 8 a, row element i.
// A byte of (word >> 4 b) & (3 << 2 h in each byte) is a code times 4^h, of the pairs q = 2 b + h
// and q + 4, both halves; the query of h = 1 is a quarter.
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
          const bool paired = T::Paired(i / 2);
          const int high = acc[v][y][i / 2 * 2][2 * a + i % 2];
          const int low = paired ? acc[v][y][i / 2 * 2][2 * a + 1]
                                 : acc[v][y][(i / 2 * 2 + 1) % T::kDotTiles][2 * a + i % 2];
          float& x = score[to + v][a][i];
          const float rest = y == 0 ? query.sum[y][i] * minimum : fmaf(query.sum[y][i], minimum, x);
          x = fmaf(static_cast<float>(high * 256 + low), scale, rest);
        }
      }
    }
  }
}

// Adds p V of 16 tokens. weight: p * v_scale per group.
template <class T>
__device__ __forceinline__ void AddValues(uint32_t codes, int lane, int u,
                                          const float (&weight)[T::kGroups][2][T::kLaneRows],
                                          SegmentState<T>& state, Int2Sums<T>& sums) {
  uint32_t b[T::kGroups][T::kColumnTiles][2];
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        b[y][n][a] = ptx::TransposeMatrix(ptx::PackHalf(
            weight[y][a][2 * n], T::Paired(n) ? 0.0f : weight[y][a][(2 * n + 1) % T::kLaneRows]));
      }
    }
  }
  constexpr uint32_t kThreeHalves = 0x3e003e00u;
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
    for (int n = 0; n < T::kColumnTiles; ++n) {
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
    for (int n = 0; n < T::kColumnTiles; ++n) {
      ptx::MmaF16(state.out[n][m], a0, a1, a2, a3, b[y][n][0], b[y][n][1]);
    }
  }
}

// Makes room for larger logits (`best`, log2 units, this lane's) or value scales. The largest key's
// p becomes a power of two, so its p * v_scale is exact in each group.
template <class T>
__device__ __forceinline__ void MoveReferences(const float (&best)[T::kLaneRows],
                                               uint32_t scale_most, SegmentState<T>& state,
                                               Int2Sums<T>& sums) {
  const float old_headroom = sums.headroom;
  for (int step = 4; step < 32; step *= 2) {
    scale_most = max(scale_most, __shfl_xor_sync(~0u, scale_most, step));
  }
  if (scale_most > sums.scale_bound) {
    // The bound is the power of two above: p * v_scale * 2^headroom stays under 2^(10 + kKeyLag).
    const int exponent = ilogbf(fmaxf(ptx::LowHalf(scale_most), 0x1p-24f)) + 1;
    sums.headroom = static_cast<float>(10 - exponent);
    sums.scale_bound = scale_most;
  }
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
    const float maximum =
        fmaxf(MaxOverTokens(best[i]),
              state.reference[i] > kNoLogit / 2 ? state.reference[i] + old_headroom : kNoLogit);
    const float factor = state.MoveReference(i, maximum - sums.headroom);
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      sums.middle[y][i] *= factor;
      for (int e = i % 2; e < 4; e += T::Paired(i / 2) ? 1 : 2) {
        sums.rounded[y][i / 2][e] *= factor;
      }
    }
  }
}

// Attention over 16-token groups first .. first + kSoftmaxGroups - 1 of a tile. `adjust(score, u)`
// changes the raw scores of 16 tokens where logits are capped or positions masked.
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
  // Only now, so that scores have its registers.
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
    grows |= best[i] - state.reference[i] > sums.headroom + T::kKeyLag;
  }
  if (__any_sync(~0u, grows)) MoveReferences<T>(best, scale_most, state, sums);

  float shift[T::kLaneRows];
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) shift[i] = query.bias[i] - state.reference[i];
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

// Attention over one tile.
template <class T, class Adjust>
__device__ __forceinline__ void AttendTile(const Int2Query<T>& query, uint32_t tile, int lane,
                                           const Adjust& adjust, SegmentState<T>& state,
                                           Int2Sums<T>& sums) {
#pragma unroll
  for (int first = 0; first < T::kTokens / 16; first += T::kSoftmaxGroups) {
    AttendTokens<T>(query, tile, lane, first, adjust, state, sums);
  }
}

// A segment's rotated query, as QuantizeQueryRow leaves it.
struct RotatedQuery {
  const uint32_t* fragment;  // [FragmentWords]
  const float* constant;     // [rows, 1 + groups] raw score to log2 units, sums of q'
};

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
    query->factor[i] = Capped<T>(k) ? 1.0f : constant[0];
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) query->sum[y][i] = constant[1 + y];
    query->bias[i] = 0.0f;
  }
}

// Terms of a row's INT2 logit under a cap: offset of the page's position block, and shift.
struct RowTerms {
  float factor;  // raw score -> nats before the cap
  float offset;  // nats
  float shift;   // nats
};
template <class T>
__device__ __forceinline__ RowTerms TermsOf(const DecodeKernelParams& k, const Segment& segment,
                                            const RotatedQuery& rotated, int page, int row) {
  const QueryRows rows = RowsOf<T>(k);
  RowTerms terms = {0.0f, 0.0f, 0.0f};
  if (row >= rows.columns) return terms;
  const int64_t at = rows.IndexOf(k, segment.sequence, segment.head, row);
  if (k.p.offset != nullptr) {
    const int block = min(page / k.p.pages_per_position_block, k.p.position_blocks - 1);
    terms.offset = k.p.offset[at * k.p.position_blocks + block] * k.scale;
  }
  if (k.p.shift != nullptr) terms.shift = k.p.shift[segment.head * rows.heads + rows.HeadOf(row)];
  terms.factor = rotated.constant[row * (1 + T::kGroups)] / kLog2E;
  return terms;
}

// Caps logits and masks positions outside the rows' spans, in place.
template <class T>
__device__ __forceinline__ void AdjustScores(const DecodeKernelParams& k, const Segment& segment,
                                             const RotatedQuery& rotated, int page, int u, int lane,
                                             float (&score)[2][T::kLaneRows]) {
  const QueryRows rows = RowsOf<T>(k);
  const int sink = k.p.lengths.sink_tokens[segment.sequence];
  const int total = sink + k.p.lengths.pages[segment.sequence] * T::kTokens +
                    WindowTokens(k.p.lengths, segment.sequence);
  for (int i = 0; i < T::kLaneRows; ++i) {
    const int row = T::RowOf(lane, i);
    if (Capped<T>(k)) {
      const RowTerms terms = TermsOf<T>(k, segment, rotated, page, row);
      for (int a = 0; a < 2; ++a) {
        const float logit = fmaf(score[a][i], terms.factor, terms.offset);
        score[a][i] = (SoftCap(logit, k.p.soft_cap) - terms.shift) * kLog2E;
      }
    }
    const RowSpan span = SpanOf<T>(k, total, rows.TokenOf(min(row, rows.columns - 1)));
    for (int a = 0; a < 2; ++a) {
      const int position = sink + page * T::kTokens + 16 * u + 8 * a + lane / 4;
      if (position < span.first) score[a][i] = -INFINITY;
    }
  }
}

// What is added to the logits of a warp's pages beside the product: offset of the page's position
// block minus shift, where there is no cap. Offsets of the next position block are asked for while
// one is attended. Lane i looks after row i.
template <class T>
class RowBiases {
 public:
  // Every stride-th page from `page` on is the warp's.
  __device__ __forceinline__ RowBiases(const DecodeKernelParams& k, const Segment& segment,
                                       int page, int stride, int lane)
      : segment_(segment), stride_(stride), lane_(lane) {
    if (!Exist(k)) return;
    const QueryRows rows = RowsOf<T>(k);
    const int row = min(lane, rows.columns - 1);
    if (k.p.shift != nullptr) shift_ = k.p.shift[segment.head * rows.heads + rows.HeadOf(row)];
    Load(k, page);
  }

  // Biases of the lane's rows (log2 units) for the warp's pages from `page` on. Returns the first
  // page behind them. `page` is the constructor's, or the warp's next one behind what was returned.
  __device__ __forceinline__ int Set(const DecodeKernelParams& k, int page,
                                     float (&bias)[T::kLaneRows]) {
    if (!Exist(k)) return segment_.end;
    const float mine = fmaf(offset_, k.scale, -shift_) * kLog2E;
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) bias[i] = __shfl_sync(~0u, mine, T::RowOf(lane_, i));
    if (k.p.offset == nullptr) return segment_.end;
    const int block = page / k.p.pages_per_position_block + 1;
    if (block >= k.p.position_blocks) return segment_.end;
    const int end = min(block * k.p.pages_per_position_block, segment_.end);
    if (end < segment_.end) Load(k, page + (end - page + stride_ - 1) / stride_ * stride_);
    return end;
  }

 private:
  __device__ __forceinline__ static bool Exist(const DecodeKernelParams& k) {
    return (k.p.offset != nullptr || k.p.shift != nullptr) && !Capped<T>(k);
  }

  __device__ __forceinline__ void Load(const DecodeKernelParams& k, int page) {
    if (k.p.offset == nullptr) return;
    const QueryRows rows = RowsOf<T>(k);
    const int block = min(page / k.p.pages_per_position_block, k.p.position_blocks - 1);
    const int64_t at =
        rows.IndexOf(k, segment_.sequence, segment_.head, min(lane_, rows.columns - 1));
    offset_ = k.p.offset[at * k.p.position_blocks + block];
  }

  const Segment& segment_;
  const int stride_;
  const int lane_;
  float offset_ = 0.0f;  // of the position block that comes next
  float shift_ = 0.0f;
};

// Attends this warp's pages of a segment from `page` on and before `end`; returns its next one.
// kPlain: no caps, no masks.
template <class T, bool kPlain, class Ring>
__device__ __forceinline__ int AttendPages(const DecodeKernelParams& k, const Segment& segment,
                                           const RotatedQuery& rotated, const WarpGroup& group,
                                           int page, int end, Int2Query<T>& query, Ring& ring,
                                           SegmentState<T>& state, Int2Sums<T>& sums) {
  const int lane = threadIdx.x % 32;
  for (; page < end; page += group.warps) {
    const uint32_t tile = ring.Wait(k);
    AttendTile<T>(
        query, tile, lane,
        [&](float(&score)[2][T::kLaneRows], int u) {
          if (!kPlain) AdjustScores<T>(k, segment, rotated, page, u, lane, score);
        },
        state, sums);
    ring.Release(k);
    if (page + group.warps < segment.end) ring.Fill(k);
  }
  return page;
}

// Tensor cores cut sums towards zero, and the largest lose most: what accumulators of codes 0 to 3
// have grown to, 1.5 for each weight, is taken out of them now and then.
template <class T>
__device__ __forceinline__ void Level(SegmentState<T>& state, Int2Sums<T>& sums) {
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
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

// This warp's share of a segment. Leaves outputs in real units in `state`. The slot of the last
// tile is released but not filled again.
template <class T, class Ring>
__device__ __forceinline__ void AttendInt2(const DecodeKernelParams& k, const Segment& segment,
                                           const RotatedQuery& rotated, const WarpGroup& group,
                                           Ring& ring, SegmentState<T>& state) {
  const int lane = threadIdx.x % 32;
  Int2Query<T> query;
  LoadQuery<T>(k, rotated, lane, &query);
  Int2Sums<T> sums;
  const bool plain = !Capped<T>(k) && !Windowed<T>(k);
  int page = segment.begin + group.warp;
  RowBiases<T> biases(k, segment, page, group.warps, lane);
  int biases_end = page, level_end = page + T::kLevelPages * group.warps;
  while (page < segment.end) {
    if (page >= level_end) {
      Level<T>(state, sums);
      level_end += T::kLevelPages * group.warps;
    }
    if (page >= biases_end) biases_end = biases.Set(k, page, query.bias);
    const int end = min(biases_end, level_end);
    page = plain ? AttendPages<T, true>(k, segment, rotated, group, page, end, query, ring, state,
                                        sums)
                 : AttendPages<T, false>(k, segment, rotated, group, page, end, query, ring, state,
                                         sums);
  }
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) sums.middle[y][i] = SumOverTokens(sums.middle[y][i]);
  }
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float unit = PowerOfTwo(24 - OutputShift(m, e / 2));
        const int y = m * T::kGroups / T::kSteps;
        // In a pair of columns the first one takes the middle, their sum is the output.
        const float middle =
            T::Paired(n) && e % 2 != 0 ? 0.0f : sums.middle[y][(2 * n + e % 2) % T::kLaneRows];
        const float add = middle - sums.rounded[y][n][e];
        state.out[n][m][e] = fmaf(state.out[n][m][e], unit, add);
      }
    }
  }
}

}  // namespace crumb::kernels::cuda
