// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/prefill/warpgroup.cuh"
#include "kernels/cuda/prefill/warpgroup_rotation.cuh"
#include "kernels/cuda/prefill/warpgroup_unpack.cuh"

// The consumers of the wgmma path over INT2 page tiles, in steps of one or two tiles: two
// warpgroups multiply the unpacked tiles (warpgroup_unpack.cuh) with 64 query rows each.
namespace crumb::kernels::cuda::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A consumer warpgroup over the unpacked tiles. The scores of the next step and the values of this
// one are in flight together.
template <class T>
class PageConsumer {
  using U = WarpgroupTraits<T>;
  static constexpr int kTokenTiles = U::kStepTokens / 8;
  static constexpr int kAccumulators = T::kExact ? T::kGroups : 1;

 public:
  __device__ __forceinline__ PageConsumer(const PrefillAttentionParams& p, const Block<T>& block,
                                          const float (&query_sum)[T::kGroups][2],
                                          WgmmaShared<T>& shared, WgmmaBarriers<T>& barriers,
                                          const Warpgroup& warpgroup, WgmmaState<T>& state)
      : p_(p),
        block_(block),
        query_sum_(query_sum),
        shared_(shared),
        barriers_(barriers),
        warpgroup_(warpgroup),
        state_(state),
        query_(Matrix(shared.warpgroup[warpgroup.index].operands[0])),
        cap_(p.soft_cap * kLog2E),
        cap_rate_(T::kSoftCap ? 2.0f / p.soft_cap : 0.0f),
        next_bias_page_(p.offset != nullptr || (p.shift != nullptr && !T::kSoftCap) ? 0 : INT_MAX) {
    if constexpr (T::kSoftCap) {
#pragma unroll
      for (int a = 0; a < 2; ++a) shift_[a] = LoadShift(warpgroup.Query(a));
    }
  }

  // Attends all pages. Returns the exponent: outputs are divided by 2^exponent.
  __device__ __forceinline__ int Attend() {
    if (warpgroup_.last_token < 0) return 0;
    const int steps = PageSteps(block_);
    float factor[2];
    FollowBias(0);
    StartScores(0);
    ptx::WaitWgmma();
    Finish(0, factor);
    Pack();
    if (warpgroup_.index == 1 && steps > 1) warpgroup_.PassTensorCores(block_);
    constexpr int kUnrolled = U::kUnrolls ? U::kBuffers : 1;
#pragma unroll 1
    for (int first = 0; first < steps - 1; first += kUnrolled) {
#pragma unroll
      for (int i = 0; i < kUnrolled; ++i) {
        if (i > 0 && first + i >= steps - 1) break;
        Advance(first + i, steps);
      }
    }
    StartValues(steps - 1);
    ptx::WaitWgmma();
    TakeValues();
    // Each of the four lanes of a row has the sum over all of the row's tokens.
    if constexpr (U::kSumsByMma) {
#pragma unroll
      for (int a = 0; a < 2; ++a) state_.sum[a] += 0.25f * sum_[0][2 * a];
    }
    return exponent_;
  }

 private:
  // Adds the values of `step` while it computes the probabilities of the next one.
  __device__ __forceinline__ void Advance(int step, int steps) {
    float factor[2];
    FollowBias(step + 1);
    warpgroup_.WaitForTensorCores(block_);
    StartScores(step + 1);
    StartValues(step);
    if (warpgroup_.index == 0 || step < steps - 2) warpgroup_.PassTensorCores(block_);
    ptx::WaitOlderWgmma<1>();
    const bool moved = Finish(step + 1, factor);
    ptx::WaitWgmma();
    TakeValues();
    ArriveStep(barriers_.values_free, step);
    if (__builtin_expect(moved, 0)) {
      state_.out.Scale(factor);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum_[0][i] *= factor[i / 2];
    }
    Pack();
  }

  // Takes the results of StartValues.
  __device__ __forceinline__ void TakeValues() {
    state_.out.TakeResults();
    if constexpr (U::kSumsByMma) ptx::TakeWgmmaResults(sum_);
  }

  // acc = q' times the step's codes, per group.
  __device__ __forceinline__ void StartScores(int step) {
    WaitStep(barriers_.keys, step);
    constexpr int kMatrix = U::kMatrixBytes / 16, kKeys = U::kStepTokens * U::kLineBytes / 16;
    const uint64_t keys = Matrix(shared_.keys[step % U::kBuffers].codes[0][0]);
    ptx::FenceWgmma();
#pragma unroll
    for (int m = 0; m < U::kMatrices; ++m) {
      const int y = T::kExact ? m * T::kGroups / U::kMatrices : 0;
#pragma unroll
      for (int part = T::kQueryParts - 1; part >= 0; --part) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const bool first = part == T::kQueryParts - 1 && s == 0 && (m == 0 || kAccumulators == 2);
          ptx::WgmmaF16Shared<kTokenTiles>(acc_[y],
                                           query_ + (U::kMatrices * part + m) * kMatrix + 2 * s,
                                           keys + m * kKeys + 2 * s, !first);
        }
      }
    }
    if constexpr (!T::kExact) {
      ptx::WgmmaF16Shared<kTokenTiles>(
          acc_[0], ptx::PlainMatrix(ptx::SharedAddress(shared_.warpgroup[warpgroup_.index].sums)),
          ptx::PlainMatrix(ptx::SharedAddress(shared_.keys[step % U::kBuffers].constants)), true);
    }
    ptx::CommitWgmma();
  }

  // out += probabilities times the step's values.
  __device__ __forceinline__ void StartValues(int step) {
    WaitStep(barriers_.values, step);
    const int buffer = step % U::kBuffers;
    const int exponent = shared_.value_exponent[buffer];
    if (__builtin_expect(exponent != exponent_, 0)) {
      const float unit = PowerOfTwo(max(exponent_ - exponent, -126));
      state_.out.Scale({unit, unit});
      exponent_ = exponent;
    }
    constexpr int kTile = T::kDim * U::kLineBytes / 16, kPart = kTile / U::kParts;
    const uint64_t values = Matrix(shared_.values[buffer].values[0][0]);
    ptx::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kTokenTiles / 2; ++k) {
#pragma unroll
      for (int part = 0; part < U::kParts; ++part) {
        ptx::WgmmaF16<U::kPartTiles>(state_.out.part[part], packed_[k],
                                     values + k / 4 * kTile + part * kPart + k % 4 * 2);
      }
      if constexpr (U::kSumsByMma) {
        ptx::WgmmaF16<1>(sum_, packed_[k], ptx::PlainMatrix(ptx::SharedAddress(shared_.ones)));
      }
    }
    ptx::CommitWgmma();
  }

  // Loads scales and minima of tokens 8 n + 2 c and 8 n + 2 c + 1 of a step.
  __device__ __forceinline__ void LoadMeta(int buffer, int n, float4 (&meta)[T::kGroups]) const {
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      meta[y] = shared_.key_meta[buffer][y][4 * n + warpgroup_.lane % 4];
    }
  }

  // The logits of a step, for ComputeProbabilities.
  struct StepLogits {
    PageConsumer& consumer;
    const int step;
    float bias[2], base[2];  // added to a logit before and after the cap, per query row of the lane
    float4 factor;           // factors of scores, one per 16 tokens of a tile, unless kExact

    __device__ __forceinline__ void Begin(int half) {
      if constexpr (!T::kExact) {
        if (half == 0) factor = consumer.shared_.key_factor[step % U::kBuffers];
      }
      const int tile = half * U::kStepTiles / 2;
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        bias[a] = consumer.shared_.warpgroup[consumer.warpgroup_.index]
                      .bias[tile][consumer.warpgroup_.Query(a)];
        base[a] = consumer.state_.minus_running_max[a];
        if constexpr (T::kSoftCap) {
          base[a] += consumer.cap_ - consumer.shift_[a];
        } else {
          bias[a] += base[a];
        }
      }
    }

    __device__ __forceinline__ void Compute(int n) {
      float x[4] = {bias[0], bias[0], bias[1], bias[1]};
      if constexpr (T::kExact) {
        float4 meta[T::kGroups];
        consumer.LoadMeta(step % U::kBuffers, n, meta);
#pragma unroll
        for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = fmaf(consumer.query_sum_[y][i / 2], i % 2 == 0 ? meta[y].z : meta[y].w, x[i]);
            x[i] = fmaf(consumer.acc_[y][n][i], i % 2 == 0 ? meta[y].x : meta[y].y, x[i]);
          }
        }
      } else {
        const int w = n % 8 / 2;
        const float f = w == 0 ? factor.x : w == 1 ? factor.y : w == 2 ? factor.z : factor.w;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = fmaf(consumer.acc_[0][n][i], f, x[i]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (T::kSoftCap) {
          // cap tanh(x / cap) = cap - 2 cap / (1 + e^(2 x / cap))
          const float power = ptx::Exp2(x[i] * consumer.cap_rate_);
          x[i] = fmaf(-2.0f * consumer.cap_, ptx::Reciprocal(1.0f + power), base[i / 2]);
        }
        consumer.acc_[0][n][i] = x[i];
      }
    }

    __device__ __forceinline__ void End(int half) {
      if (half == 0) return;
      if (__builtin_expect(U::kStepTiles > 1 && step * U::kStepTiles + 1 >= consumer.block_.pages,
                           0)) {
        asm volatile("");  // keeps a branch: as selects these instructions would run in every step
#pragma unroll
        for (int n = kTokenTiles / 2; n < kTokenTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) consumer.acc_[0][n][i] = -INFINITY;
        }
      }
      ArriveStep(consumer.barriers_.keys_free, step);
    }
  };

  // Turns the step's scores into probabilities in place, while values of the previous step may
  // still be accumulating. Returns whether the running max was raised (ComputeProbabilities).
  __device__ __forceinline__ bool Finish(int step, float (&factor)[2]) {
#pragma unroll
    for (int y = 0; y < kAccumulators; ++y) ptx::TakeWgmmaResults(acc_[y]);
    return ComputeProbabilities < !T::kExact &&
           !U::kSumsByMma > (acc_[0], StepLogits{*this, step}, state_, factor);
  }

  // Packs the probabilities as operands. If kExact or kSumsByMma, the softmax sum adds the rounded
  // probabilities, so a token that holds nearly all of a row has no rounding error.
  __device__ __forceinline__ void Pack() {
#pragma unroll
    for (int k = 0; k < kTokenTiles / 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&x)[4] = acc_[0][2 * k + i / 2];
        packed_[k][i] = ptx::PackHalf(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
        if constexpr (T::kExact) {
          state_.sum[i % 2] += ptx::LowHalf(packed_[k][i]) + ptx::HighHalf(packed_[k][i]);
        }
      }
    }
  }

  // Updates the warp's biases in shared memory, from offset and shift, for the step's tiles.
  __device__ __forceinline__ void FollowBias(int step) {
    const int first = step * U::kStepTiles;
    if (__builtin_expect(first + U::kStepTiles <= next_bias_page_ && !spread_, 1)) return;
    float(&bias)[U::kStepTiles][U::kQueryRows] = shared_.warpgroup[warpgroup_.index].bias;
    const int query = 16 * warpgroup_.warp + warpgroup_.lane % 16;
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

  // Returns the bias of a query row in the position block of `page`, log2 units.
  __device__ __forceinline__ float LoadBias(int page, int query) {
    const int position_block =
        p_.offset != nullptr ? min(page / p_.pages_per_position_block, p_.position_blocks - 1) : 0;
    next_bias_page_ = p_.offset != nullptr && position_block + 1 < p_.position_blocks
                          ? (position_block + 1) * p_.pages_per_position_block
                          : INT_MAX;
    const int row = shared_.warpgroup[warpgroup_.index].row[query];
    float bias = 0.0f;
    if (row >= 0 && p_.offset != nullptr) {
      bias =
          p_.offset[static_cast<int64_t>(row) * p_.position_blocks + position_block] * block_.scale;
    }
    bias *= kLog2E;
    return T::kSoftCap ? bias : bias - LoadShift(query);
  }

  // Returns the shift of a query row, log2 units. It applies after the cap.
  __device__ __forceinline__ float LoadShift(int query) const {
    const int row = shared_.warpgroup[warpgroup_.index].row[query];
    return row >= 0 && p_.shift != nullptr ? p_.shift[row % p_.shape.q_heads] * kLog2E : 0.0f;
  }

  const PrefillAttentionParams& p_;
  const Block<T>& block_;
  const float (&query_sum_)[T::kGroups][2];
  WgmmaShared<T>& shared_;
  WgmmaBarriers<T>& barriers_;
  const Warpgroup& warpgroup_;
  WgmmaState<T>& state_;
  const uint64_t query_;
  const float cap_, cap_rate_;  // the cap in log2 units; 2 / cap in nats
  float shift_[2] = {};         // shifts of the lane's query rows, if kSoftCap
  float acc_[kAccumulators][kTokenTiles][4];
  uint32_t packed_[kTokenTiles / 2][4];
  // Sums of the rounded probabilities of the lane's rows over all four lanes' tokens, if
  // kSumsByMma.
  float sum_[1][4] = {};
  int exponent_ = 0;
  int next_bias_page_;  // first page of the next position block
  // whether the last tile of the previous step, but not its first, began a position block
  bool spread_ = false;
};

// Attends all pages of the block's sequence. Leaves outputs in the model's basis. Every thread of
// both consumer warpgroups calls it, also of an idle one; query rows that do not exist take part as
// zeros.
template <class T>
__device__ __forceinline__ void AttendPagesByWgmma(const PrefillAttentionParams& p,
                                                   const Block<T>& block, WgmmaShared<T>& shared,
                                                   WgmmaBarriers<T>& barriers,
                                                   const Warpgroup& warpgroup,
                                                   WgmmaState<T>& state) {
  float query_sum[T::kGroups][2];
  if constexpr (WarpgroupTraits<T>::kSumsByMma) {
    constexpr uint32_t kOnes = 0x3c003c00;
    if (threadIdx.x < 16) shared.ones[threadIdx.x] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    ptx::FenceCopyEngine();
  }
  PrepareWarpgroupQuery<T>(p, block, shared, warpgroup, query_sum);
  ptx::FenceCopyEngine();
  SignalProducers<T>();
  const int exponent =
      PageConsumer<T>(p, block, query_sum, shared, barriers, warpgroup, state).Attend();
  SyncConsumers();  // no warp multiplies any longer, so the memory of the tiles is free
  InverseRotateWarpgroup<T>(p, block, PowerOfTwo(exponent), shared, warpgroup, state);
}

#endif

}  // namespace crumb::kernels::cuda::prefill
