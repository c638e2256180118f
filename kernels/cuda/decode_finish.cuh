// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode_rotate.cuh"
#include "kernels/cuda/decode_traits.cuh"

// From warps' sums to outputs: warps of a block into a segment's partial result, segments of a
// (sequence, KV head) into the output, by whichever block completes it, in split order.
namespace crumb::kernels::cuda {

// A warp's softmax state of one row.
struct RowState {
  float reference;
  float sum;
};

// Where warps leave their states and the addresses of their sums, in the staging area.
template <class T>
struct BlockStates {
  RowState* state;  // [warps, kRows]
  uint32_t* slot;   // [warps]

  __device__ __forceinline__ BlockStates(float* stage, int warps)
      : state(reinterpret_cast<RowState*>(stage)),
        slot(reinterpret_cast<uint32_t*>(state + warps * T::kRows)) {}
};

// Sums the first `active` warps' states into the segment's partial result. `slot` is the warp's
// released slot. By all threads; `fill` starts the copy that was held back.
template <class T, class Fill>
__device__ __forceinline__ void StorePartial(const DecodeKernelParams& k, int segment, int active,
                                             uint32_t slot, float* stage, SegmentState<T>& state,
                                             const Fill& fill) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const BlockStates<T> shared(stage, k.launch.warps);
  if (warp < active) {
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) {
      const float sum = SumOverTokens(state.sum[i]);
      if (lane < 4) shared.state[warp * T::kRows + T::RowOf(lane, i)] = {state.reference[i], sum};
    }
    if (lane == 0) shared.slot[warp] = slot;
  }
  constexpr int kValues = T::kLaneValues;
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
    if (warp < active) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        const float* o = state.out[n][T::kPair ? v / 2 : v / 4];
        const float x = T::kPair ? o[2 * (v % 2)] + o[2 * (v % 2) + 1] : o[v % 4];
        ptx::StoreShared(slot + 4 * (32 * v + lane), x);
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 32 * kValues; e += blockDim.x) {
      const int v = e / 32;
      const int row = T::RowOf(lane, T::kPair ? 0 : 2 * n + v % 2);
      const int channel = T::kPair ? 8 * v + lane / 4 : 8 * (v / 2) + lane / 4;
      float reference = kNoLogit;
      for (int w = 0; w < active; ++w) {
        reference = fmaxf(reference, shared.state[w * T::kRows + row].reference);
      }
      float value = 0.0f, sum = 0.0f;
      for (int w = 0; w < active; ++w) {
        const RowState s = shared.state[w * T::kRows + row];
        const float weight = ptx::Exp2(s.reference - reference);
        value = fmaf(weight, ptx::LoadSharedFloat(shared.slot[w] + 4 * e), value);
        sum = fmaf(weight, s.sum, sum);
      }
      const int64_t at = static_cast<int64_t>(segment) * T::kRows + row;
      k.workspace.partial[at * T::kDim + channel] = value;
      if (channel == 0) reinterpret_cast<RowState*>(k.workspace.row_state)[at] = {reference, sum};
    }
    __syncthreads();
  }
  if (warp < active) fill();
}

// Completes pairs: counts this block's segments in, and finishes those whose last segment it was.
template <class T>
class PairFinish {
 public:
  // stage: kPassRows staged rows; ring: the block's slots, idle now.
  __device__ __forceinline__ PairFinish(const DecodeKernelParams& k, float* stage, char* ring)
      : k_(k),
        rows_(k),
        stage_(stage),
        turned_(reinterpret_cast<float*>(ring)),
        weight_(turned_ + kPassRows * kStageStride<T::kDim>),
        row_(reinterpret_cast<PassRow*>(weight_ + kPassRows * kWeightsMax)),
        list_(reinterpret_cast<int*>(row_ + kPassRows)) {}

  __device__ __forceinline__ void Run(int segment, int segment_end) {
    __threadfence();
    __syncthreads();
    for (; segment < segment_end; segment += kListMax) {
      const int count = CountIn(segment, min(segment + kListMax, segment_end));
      constexpr int kPerPass = T::kRows < kPassRows ? kPassRows / T::kRows : 1;
      for (int i = 0; i < count;) {
        // Pairs of one head share a pass.
        int pairs = 1;
        const int head = k_.plan.segments[list_[1 + i]].head;
        while (pairs < kPerPass && i + pairs < count &&
               k_.plan.segments[list_[1 + i + pairs]].head == head) {
          ++pairs;
        }
        for (int row = 0; row < T::kRows; row += kPassRows) FinishPass(i, pairs, head, row);
        i += pairs;
      }
    }
  }

 private:
  static constexpr int kListMax = 512;
  static constexpr int kTogether = 4;      // rows a thread merges at a time
  static constexpr int kWeightsMax = 160;  // segments of a pair whose weights are kept

  // A row of the pass: its pair's segments, history first, and the merged softmax state.
  struct PassRow {
    int row;  // -1: none
    int sequence;
    int head;
    int int2_first;
    int int2_count;
    int bf16_first;
    int bf16_count;
    float reference;
    float sum;
    float mass;  // of the history

    __device__ __forceinline__ int SegmentAt(int i) const {
      return i < int2_count ? int2_first + i : bf16_first + i - int2_count;
    }
  };

  // Lists the segments that completed their pair. Returns their number, to all threads.
  __device__ __forceinline__ int CountIn(int segment, int segment_end) {
    const int lane = threadIdx.x % 32;
    __syncthreads();
    if (threadIdx.x < 32) {
      int count = 0;
      for (int first = segment; first < segment_end; first += 32) {
        bool last = false;
        if (first + lane < segment_end) {
          const Segment& s = k_.plan.segments[first + lane];
          const int all = s.int2_count + s.bf16_count;
          last = atomicAdd(k_.workspace.arrivals + s.pair, 1) == all - 1;
          if (last) k_.workspace.arrivals[s.pair] = 0;
        }
        const uint32_t mask = __ballot_sync(~0u, last);
        if (last) list_[1 + count + __popc(mask & ((1u << lane) - 1))] = first + lane;
        count += __popc(mask);
      }
      if (lane == 0) list_[0] = count;
      __threadfence();
    }
    __syncthreads();
    return list_[0];
  }

  __device__ __forceinline__ void FinishPass(int first, int pairs, int head, int first_row) {
    if (k_.p.rotation_v != nullptr && head != head_ && threadIdx.x / 32 < T::kDim / 8) {
      head_ = head;
      LoadRows(head, threadIdx.x / 32, kept_);
    }
    for (int slot = threadIdx.x / 32; slot < kPassRows; slot += k_.launch.warps) {
      const int pair = slot / T::kRows, row = first_row + slot % T::kRows;
      MergeStates(slot, pair < pairs && row < rows_.columns ? list_[1 + first + pair] : -1, row);
    }
    __syncthreads();
    const int channel = threadIdx.x % T::kDim, stride = blockDim.x / T::kDim;
    for (int slot = threadIdx.x / T::kDim; slot < kPassRows; slot += kTogether * stride) {
      MergeHistory(slot, stride, channel);
    }
    __syncthreads();
    if (k_.p.rotation_v != nullptr) {
      if (threadIdx.x / 32 < T::kDim / 8) Unrotate(kept_, threadIdx.x / 32);
      for (int n = threadIdx.x / 32 + k_.launch.warps; n < T::kDim / 8; n += k_.launch.warps) {
        float2 r[T::kSteps][2];
        LoadRows(head, n, r);
        Unrotate(r, n);
      }
      __syncthreads();
    }
    for (int slot = threadIdx.x / T::kDim; slot < kPassRows; slot += kTogether * stride) {
      StoreOutputs(slot, stride, channel);
    }
    __syncthreads();
  }

  __device__ __forceinline__ RowState StateOf(int segment, int row) const {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(k_.workspace.row_state) +
                            static_cast<int64_t>(segment) * T::kRows + row);
    return {x.x, x.y};
  }
  __device__ __forceinline__ float WeightOf(int slot, int i) const {
    if (i < kWeightsMax) return weight_[slot * kWeightsMax + i];
    const PassRow& at = row_[slot];
    return ptx::Exp2(StateOf(at.SegmentAt(i), at.row).reference - at.reference);
  }
  __device__ __forceinline__ const float* PartialOf(const PassRow& at, int i) const {
    return k_.workspace.partial +
           (static_cast<int64_t>(at.SegmentAt(i)) * T::kRows + at.row) * T::kDim;
  }

  // Reference, weights and sum over the pair's segments and the learned sink. One warp.
  __device__ __forceinline__ void MergeStates(int slot, int segment, int row) {
    const int lane = threadIdx.x % 32;
    PassRow at = {};
    at.row = -1;
    if (segment >= 0) {
      const Segment& s = k_.plan.segments[segment];
      at = {row,          s.sequence,   s.head, s.int2_first, s.int2_count,
            s.bf16_first, s.bf16_count, 0.0f,   0.0f,         0.0f};
      const bool has_sink = k_.p.sink_logit != nullptr;
      const float sink =
          has_sink ? k_.p.sink_logit[s.head * rows_.heads + row % rows_.heads] * kLog2E : kNoLogit;
      const int count = at.int2_count + at.bf16_count;
      const RowState mine = lane < count ? StateOf(at.SegmentAt(lane), row) : RowState{kNoLogit, 0};
      float most = fmaxf(sink, mine.reference);
      for (int i = lane + 32; i < count; i += 32) {
        most = fmaxf(most, StateOf(at.SegmentAt(i), row).reference);
      }
      for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      at.reference = most;
      float sum = has_sink && lane == 0 ? ptx::Exp2(sink - most) : 0.0f;
      for (int i = lane; i < count; i += 32) {
        const RowState state = i == lane ? mine : StateOf(at.SegmentAt(i), row);
        const float weight = ptx::Exp2(state.reference - most);
        if (i < kWeightsMax) weight_[slot * kWeightsMax + i] = weight;
        sum = fmaf(weight, state.sum, sum);
        if (i < at.int2_count) at.mass = fmaf(weight, state.sum, at.mass);
      }
      for (int step = 1; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        at.mass += __shfl_xor_sync(~0u, at.mass, step);
      }
      at.sum = sum;
    }
    if (lane == 0) row_[slot] = at;
  }

  // Weighted sums of the segments' values of one channel in kTogether rows, `stride` slots apart:
  // history (kBf16 false) or BF16. Loads go out together.
  template <bool kBf16>
  __device__ __forceinline__ void SumSegments(int slot, int stride, int channel,
                                              float (&value)[kTogether]) const {
    constexpr int kAhead = kBf16 ? 2 : 8;
    int begin[kTogether], end[kTogether], most = 0;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      begin[j] = end[j] = 0;
      value[j] = 0.0f;
      if (slot + j * stride >= kPassRows) continue;
      const PassRow& at = row_[slot + j * stride];
      if (at.row < 0) continue;
      begin[j] = kBf16 ? at.int2_count : 0;
      end[j] = at.int2_count + (kBf16 ? at.bf16_count : 0);
      most = max(most, end[j] - begin[j]);
    }
    for (int first = 0; first < most; first += kAhead) {
      float part[kTogether][kAhead];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int index = begin[j] + first + i;
          part[j][i] =
              index < end[j] ? __ldcg(PartialOf(row_[slot + j * stride], index) + channel) : 0.0f;
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int index = begin[j] + first + i;
          if (index < end[j]) {
            value[j] = fmaf(WeightOf(slot + j * stride, index), part[j][i], value[j]);
          }
        }
      }
    }
  }

  // Stages the INT2 part of one channel, in the rotated basis, with the mean.
  __device__ __forceinline__ void MergeHistory(int slot, int stride, int channel) {
    float value[kTogether];
    SumSegments<false>(slot, stride, channel, value);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (slot + j * stride >= kPassRows) continue;
      const PassRow& at = row_[slot + j * stride];
      if (k_.p.mean_v != nullptr && at.row >= 0) {
        value[j] = fmaf(at.mass, k_.p.mean_v[at.head * T::kDim + channel], value[j]);
      }
      stage_[(slot + j * stride) * kStageStride<T::kDim> + channel] = value[j];
    }
  }

  // The elements of R_V that a lane needs for channels 8 n .. 8 n + 7 of a product with R_V'.
  __device__ __forceinline__ void LoadRows(int head, int n, float2 (&r)[T::kSteps][2]) {
    const int lane = threadIdx.x % 32;
    const float* m = k_.p.rotation_v + static_cast<int64_t>(head) * T::kDim * T::kDim +
                     static_cast<int64_t>(8 * n + lane / 4) * T::kDim + lane % 4 * 2;
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      r[s][0] = *reinterpret_cast<const float2*>(m + 16 * s);
      r[s][1] = *reinterpret_cast<const float2*>(m + 16 * s + 8);
    }
  }

  // Channels 8 n .. 8 n + 7 of stage R_V'.
  __device__ __forceinline__ void Unrotate(const float2 (&r)[T::kSteps][2], int n) {
    const int lane = threadIdx.x % 32;
    float acc[4] = {};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      SplitFragment a;
      StagedFragment<T::kDim>(stage_, lane, s, &a);
      uint32_t high[2], low[2];
      ptx::SplitBf16(r[s][0].x, r[s][0].y, &high[0], &low[0]);
      ptx::SplitBf16(r[s][1].x, r[s][1].y, &high[1], &low[1]);
      ptx::MmaBf16(acc, a.high, high[0], high[1]);
      ptx::MmaBf16(acc, a.high, low[0], low[1]);
      ptx::MmaBf16(acc, a.low, high[0], high[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(turned_ + (lane / 4 + 8 * i) * kStageStride<T::kDim> + 8 * n +
                                 lane % 4 * 2) = make_float2(acc[2 * i], acc[2 * i + 1]);
    }
  }

  // Adds the BF16 part of one channel, divides by the softmax sum and writes the output.
  __device__ __forceinline__ void StoreOutputs(int slot, int stride, int channel) const {
    const float* history = k_.p.rotation_v != nullptr ? turned_ : stage_;
    float value[kTogether];
    SumSegments<true>(slot, stride, channel, value);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (slot + j * stride >= kPassRows) continue;
      const PassRow& at = row_[slot + j * stride];
      if (at.row < 0) continue;
      const float sum = value[j] + history[(slot + j * stride) * kStageStride<T::kDim> + channel];
      const float result = at.sum > 0.0f ? sum / at.sum : 0.0f;
      const int64_t index = rows_.IndexOf(k_, at.sequence, at.head, at.row);
      if (k_.p.out_type == OutType::kF32) {
        static_cast<float*>(k_.p.out)[index * T::kDim + channel] = result;
      } else {
        static_cast<__nv_bfloat16*>(k_.p.out)[index * T::kDim + channel] =
            __float2bfloat16_rn(result);
      }
      if (channel == 0 && k_.p.lse != nullptr) {
        k_.p.lse[index] = (at.reference + log2f(at.sum)) / kLog2E;
      }
    }
  }

  const DecodeKernelParams& k_;
  const QueryRows rows_;
  float* stage_;
  float* turned_;              // stage R_V'
  float* weight_;              // [kPassRows, kWeightsMax]
  PassRow* row_;               // [kPassRows]
  int* list_;                  // count, then segments
  int head_ = -1;              // whose R_V is kept
  float2 kept_[T::kSteps][2];  // channels 8 warp .. 8 warp + 7
};

}  // namespace crumb::kernels::cuda
