// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/bf16_rows.cuh"
#include "kernels/cuda/prefill/warpgroup.cuh"
#include "kernels/cuda/prefill/warpgroup_rotation.cuh"

// The wgmma path over BF16 rows, 64 tokens per stage: sink, BF16 pages, recent ring and the fresh
// tokens themselves. The query is exact; probabilities are split into two bf16 parts.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Returns the number of BF16 tokens of the block, up to the fresh token of its last query row.
template <class T>
__device__ __forceinline__ int Bf16RowsEnd(const Block<T>& block) {
  return block.sink + block.recent + block.last_token + 1;
}

// The four producer warps of K, or of V. Each thread copies a 16-byte piece of every kStep-th
// token.
template <class T>
class RowProducer {
  using U = WarpgroupTraits<T>;
  static constexpr int kPieces = T::kDim / 8, kStep = T::kThreads / kPieces, kAhead = 2;
  // Rows that are 4 apart differ in the third bit of a piece's place in the swizzle, rows that are
  // 8 apart lie alike.
  static constexpr uint32_t kSwizzleStep = kStep % 8 == 0 ? 0 : 4 * 16;
  static_assert(kStep % 4 == 0 && U::kRows % (2 * kStep) == 0);

 public:
  __device__ __forceinline__ RowProducer(const PrefillAttentionParams& p, const Block<T>& block,
                                         bool value, WgmmaShared<T>& shared,
                                         WgmmaBarriers<T>& barriers)
      : p_(p),
        block_(block),
        value_(value),
        barriers_(barriers),
        sources_(p, block),
        row_(static_cast<int>(threadIdx.x) % T::kThreads / kPieces),
        piece_(static_cast<int>(threadIdx.x) % kPieces),
        to_(ptx::SharedAddress(shared.rows[0][value][piece_ / 8][row_]) +
            ((piece_ ^ row_) % 8) * 16) {}

  // Copies all BF16 tokens, and zeros behind the last one.
  __device__ __forceinline__ void Run() {
    const int end = Bf16RowsEnd(block_), stages = (end + U::kRows - 1) / U::kRows;
#pragma unroll 1
    for (int stage = 0; stage < stages + kAhead; ++stage) {
      if (stage < stages) {
        if (stage >= U::kStages) WaitStep(barriers_.rows_free, stage - U::kStages);
        const int first = stage * U::kRows;
        const int64_t stride = Stride(first, end);
        if (stride != 0) {
          CopyContiguous(sources_.Address(p_, block_, first + row_, value_), stride,
                         stage % U::kStages);
        } else {
          CopyScattered(first, end, stage % U::kStages);
        }
      }
      ptx::CommitCopies();
      if (stage >= kAhead) {
        ptx::WaitCopies<kAhead>();
        ptx::FenceCopyEngine();
        ArriveStep(barriers_.rows, stage - kAhead);
      }
    }
  }

 private:
  static constexpr uint32_t kStageBytes = 2 * U::kMatrices * U::kRows * U::kLineBytes;

  // Returns the bytes from one of the stage's rows to the next, or 0 if their stride is not
  // constant.
  __device__ __forceinline__ int64_t Stride(int first, int end) const {
    const int last = first + U::kRows - 1, page = first - block_.sink;
    if (last >= end) return 0;
    if (first >= block_.sink + block_.recent) {
      return p_.token_stride * static_cast<int64_t>(sizeof(Bf16));
    }
    const bool sink = last < block_.sink;
    const bool paged = page >= 0 && page % U::kRows == 0 && page < block_.paged;
    static_assert(kPageRows % U::kRows == 0);
    return sink || paged ? p_.sink.token_stride : 0;
  }

  __device__ __forceinline__ void CopyContiguous(uint64_t from, int64_t stride, int stage) const {
    uint32_t to = to_ + stage * kStageBytes;
    from += 16 * piece_;
#pragma unroll
    for (int i = 0; i < U::kRows / kStep; ++i) {
      ptx::CopyAsync16(to, reinterpret_cast<const void*>(from));
      from += kStep * stride;
      to = (to + kStep * U::kLineBytes) ^ kSwizzleStep;
    }
  }

  // Copies a stage whose tokens come from several places, or the last stage.
  __device__ __forceinline__ void CopyScattered(int first, int end, int stage) const {
    uint32_t to = to_ + stage * kStageBytes;
#pragma unroll 1
    for (int token = first + row_; token < first + U::kRows; token += kStep) {
      if (token < end) {
        ptx::CopyAsync16(
            to,
            reinterpret_cast<const uint4*>(sources_.Address(p_, block_, token, value_)) + piece_);
      } else {
        ptx::StoreShared128(to, make_uint4(0, 0, 0, 0));
      }
      to = (to + kStep * U::kLineBytes) ^ kSwizzleStep;
    }
  }

  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  const bool value_;
  WgmmaBarriers<T>& barriers_;
  const RowSources sources_;
  const int row_, piece_;
  const uint32_t to_;
};

// A consumer warpgroup over BF16 rows. The scores of the next stage and the values of this one are
// in flight together.
template <class T>
class RowConsumer {
  using U = WarpgroupTraits<T>;
  static constexpr int kTokenTiles = U::kRows / 8;

 public:
  __device__ __forceinline__ RowConsumer(const PrefillAttentionParams& p, const Block<T>& block,
                                         WgmmaShared<T>& shared, WgmmaBarriers<T>& barriers,
                                         const Warpgroup& warpgroup, WgmmaState<T>& state)
      : before_(block.sink + block.recent),
        stages_((Bf16RowsEnd(block) + U::kRows - 1) / U::kRows),
        scale_(block.scale),
        cap_(p.soft_cap),
        shared_(shared),
        barriers_(barriers),
        warpgroup_(warpgroup),
        state_(state),
        query_(Matrix(shared.warpgroup[warpgroup.index].operands[0])) {
    WarpgroupShared<T>& own = shared.warpgroup[warpgroup.index];
    warpgroup.Sync();
    LoadWarpgroupQuery<T>(p, own, warpgroup, own.operands[0]);
    ptx::FenceCopyEngine();
    warpgroup.Sync();
#pragma unroll
    for (int a = 0; a < 2; ++a) token_[a] = before_ + own.token[warpgroup.Query(a)];
  }

  // Attends all stages up to the token of the warpgroup's last query row.
  __device__ __forceinline__ void Attend() {
    if (warpgroup_.last_token < 0) return;
    const int stages = (before_ + warpgroup_.last_token + U::kRows) / U::kRows;
    float factor[2];
    StartScores(0);
    ptx::WaitWgmma();
    if (Finish(0, factor)) state_.out.Scale(factor);
    Pack();
#pragma unroll 1
    for (int stage = 0; stage < stages - 1; ++stage) {
      StartScores(stage + 1);
      StartValues(stage);
      ptx::WaitOlderWgmma<1>();
      const bool moved = Finish(stage + 1, factor);
      ptx::WaitWgmma();
      state_.out.TakeResults();
      ArriveStep(barriers_.rows_free, stage);
      if (__builtin_expect(moved, 0)) state_.out.Scale(factor);
      Pack();
    }
    StartValues(stages - 1);
    ptx::WaitWgmma();
    state_.out.TakeResults();
#pragma unroll 1
    for (int stage = stages - 1; stage < stages_; ++stage) ArriveStep(barriers_.rows_free, stage);
  }

 private:
  __device__ __forceinline__ void StartScores(int stage) {
    WaitStep(barriers_.rows, stage);
    const uint64_t keys = Matrix(shared_.rows[stage % U::kStages][0][0][0]);
    ptx::FenceWgmma();
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      ptx::WgmmaBf16Shared<kTokenTiles>(acc_, query_ + s / 4 * (U::kMatrixBytes / 16) + s % 4 * 2,
                                        keys + s / 4 * (U::kRows * U::kLineBytes / 16) + s % 4 * 2,
                                        s > 0);
    }
    ptx::CommitWgmma();
  }

  __device__ __forceinline__ void StartValues(int stage) {
    const uint64_t values = ptx::TransposedMatrix(
        ptx::SharedAddress(shared_.rows[stage % U::kStages][1][0][0]), U::kRows * U::kLineBytes);
    constexpr int kPart = U::kMatrices / U::kParts * U::kRows * U::kLineBytes / 16;
    ptx::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kTokenTiles / 2; ++k) {
#pragma unroll
      for (int part = 0; part < U::kParts; ++part) {
        const uint64_t b = values + part * kPart + 128 * k;
        ptx::WgmmaBf16Transposed<U::kPartTiles>(state_.out.part[part], low_[k], b);
        ptx::WgmmaBf16Transposed<U::kPartTiles>(state_.out.part[part], high_[k], b);
      }
    }
    ptx::CommitWgmma();
  }

  // The logits of a stage, for ComputeProbabilities.
  struct StageLogits {
    RowConsumer& consumer;
    const int first_token;
    const bool masked;  // some rows do not attend all tokens of the stage

    __device__ __forceinline__ void Begin(int) const {}
    __device__ __forceinline__ void Compute(int n) const {
      const RunningSoftmax& state = consumer.state_;
      float(&x)[4] = consumer.acc_[n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (T::kSoftCap) {
          x[i] = SoftCap(x[i] * consumer.scale_, consumer.cap_) * kLog2E +
                 state.minus_running_max[i / 2];
        } else {
          x[i] = fmaf(x[i], consumer.scale_ * kLog2E, state.minus_running_max[i / 2]);
        }
        const int token = first_token + 8 * n + i % 2;
        if (masked && token > consumer.token_[i / 2]) x[i] = -INFINITY;
      }
    }
    __device__ __forceinline__ void End(int) const {}
  };

  __device__ __forceinline__ bool Finish(int stage, float (&factor)[2]) {
    ptx::TakeWgmmaResults(acc_);
    const int first = stage * U::kRows;
    const bool masked = first + U::kRows - 1 > min(token_[0], token_[1]);
    const StageLogits logits{*this, first + 2 * (warpgroup_.lane % 4), masked};
    return ComputeProbabilities<true>(acc_, logits, state_, factor);
  }

  // Splits the probabilities into operands of two bf16 parts.
  __device__ __forceinline__ void Pack() {
#pragma unroll
    for (int k = 0; k < kTokenTiles / 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&x)[4] = acc_[2 * k + i / 2];
        ptx::SplitBf16(x[2 * (i % 2)], x[2 * (i % 2) + 1], &high_[k][i], &low_[k][i]);
      }
    }
  }

  const int before_, stages_;
  const float scale_, cap_;  // scale and cap of logits, in nats
  WgmmaShared<T>& shared_;
  WgmmaBarriers<T>& barriers_;
  const Warpgroup& warpgroup_;
  WgmmaState<T>& state_;
  int token_[2];  // last token that the lane's query rows attend
  const uint64_t query_;
  float acc_[kTokenTiles][4];
  uint32_t high_[kTokenTiles / 2][4], low_[kTokenTiles / 2][4];
};

// Divides by the softmax sums and writes the warpgroup's rows.
template <class T>
__device__ __forceinline__ void WriteWarpgroupRows(const PrefillAttentionParams& p,
                                                   WarpgroupShared<T>& shared,
                                                   const Warpgroup& warpgroup,
                                                   WgmmaState<T>& state) {
  using U = WarpgroupTraits<T>;
  const int c = warpgroup.lane % 4;
  float unit[2];
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const int row = shared.row[warpgroup.Query(a)];
    float sum = SumOverQuad(state.sum[a]), running_max = -state.minus_running_max[a], factor = 1.0f;
    if (p.sink_logit != nullptr && row >= 0) {
      const float logit = p.sink_logit[row % p.shape.q_heads] * kLog2E;
      const float top = fmaxf(running_max, logit);
      factor = ptx::Exp2(running_max - top);
      sum = sum * factor + ptx::Exp2(logit - top);
      running_max = top;
    }
    unit[a] = sum > 0.0f ? factor / sum : sum == 0.0f ? 0.0f : NAN;
    if (p.lse != nullptr && row >= 0 && c == 0) p.lse[row] = (running_max + log2f(sum)) * kLn2;
  }
  state.out.Scale(unit);
  if (p.out_type == OutType::kBf16) {
    warpgroup.Sync();  // its wgmmas have read the query
#pragma unroll
    for (int n = 0; n < T::kDim / 8; n += 2) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&y)[4] = state.out.Tile(n + i / 2);
        x[i] = ptx::PackBf16(y[2 * (i % 2)], y[2 * (i % 2) + 1]);
      }
      ptx::StoreMatrices(LineAddress<T>(shared.operands[n / 8], n % 8, warpgroup), x);
    }
    warpgroup.Sync();
    constexpr int kPieces = T::kDim / 8;
#pragma unroll 4
    for (int i = warpgroup.thread; i < U::kQueryRows * kPieces; i += T::kThreads) {
      const int query = i / kPieces, piece = i % kPieces, row = shared.row[query];
      if (row < 0) continue;
      reinterpret_cast<uint4*>(p.out)[static_cast<int64_t>(row) * kPieces + piece] =
          *reinterpret_cast<const uint4*>(shared.operands[piece / 8] + query * U::kLineBytes +
                                          ((piece ^ query) % 8) * 16);
    }
    return;
  }
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const int row = shared.row[warpgroup.Query(a)];
    if (row < 0) continue;
    float* to = static_cast<float*>(p.out) + static_cast<int64_t>(row) * T::kDim + 2 * c;
#pragma unroll
    for (int n = 0; n < T::kDim / 8; ++n) {
      const float(&x)[4] = state.out.Tile(n);
      *reinterpret_cast<float2*>(to + 8 * n) = make_float2(x[2 * a], x[2 * a + 1]);
    }
  }
}

#endif

}  // namespace crumb::kernels::cuda::prefill
