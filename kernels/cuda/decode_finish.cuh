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
// Merging is a warp's work per query row, so that a small batch costs few instructions.
template <class T>
class PairFinish {
 public:
  // ring: the block's slots, idle now.
  __device__ __forceinline__ PairFinish(const DecodeKernelParams& k, char* ring)
      : k_(k),
        rows_(k),
        turned_(reinterpret_cast<float*>(ring)),
        plain_(turned_ + kPassRows * kStageStride<T::kDim>),
        high_(reinterpret_cast<uint32_t*>(plain_ + kPassRows * kStageStride<T::kDim>)),
        low_(high_ + kPassRows * kSplitStride),
        row_(reinterpret_cast<PassRow*>(low_ + kPassRows * kSplitStride)),
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
  static constexpr int kSplitStride = T::kDim / 2 + 4;  // words from one row to the next

  // A row of the pass: where its output goes, and what it is divided by.
  struct PassRow {
    int64_t index;  // of the row in the output, -1: none
    float reference;
    float sum;
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
    const int warp = threadIdx.x / 32;
    for (int slot = warp; slot < kPassRows; slot += k_.launch.warps) {
      const int pair = slot / T::kRows, row = first_row + slot % T::kRows;
      MergeRow(slot, pair < pairs && row < rows_.columns ? list_[1 + first + pair] : -1, row);
    }
    __syncthreads();
    if (k_.p.rotation_v != nullptr) {
      for (int n = warp; n < T::kDim / 8; n += k_.launch.warps) Unrotate(head, n);
      __syncthreads();
    }
    for (int slot = warp; slot < kPassRows; slot += k_.launch.warps) StoreRow(slot);
    __syncthreads();
  }

  __device__ __forceinline__ RowState StateOf(int segment, int row) const {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(k_.workspace.row_state) +
                            static_cast<int64_t>(segment) * T::kRows + row);
    return {x.x, x.y};
  }

  // Merges the segments of one row in split order: history into the rows to turn back, BF16 apart.
  __device__ __forceinline__ void MergeRow(int slot, int segment, int row) {
    const int lane = threadIdx.x % 32;
    if (segment < 0) {
      if (lane == 0) row_[slot].index = -1;
      for (int i = lane; i < T::kDim / 2; i += 32) {
        high_[slot * kSplitStride + i] = low_[slot * kSplitStride + i] = 0;
      }
      return;
    }
    const Segment s = k_.plan.segments[segment];
    const int count = s.int2_count + s.bf16_count;
    const auto segment_at = [&](int i) {
      return i < s.int2_count ? s.int2_first + i : s.bf16_first + i - s.int2_count;
    };
    const auto state_at = [&](int i) {
      return i < count ? StateOf(segment_at(i), row) : RowState{kNoLogit, 0.0f};
    };
    const bool has_sink = k_.p.sink_logit != nullptr;
    const float sink =
        has_sink ? k_.p.sink_logit[s.head * rows_.heads + row % rows_.heads] * kLog2E : kNoLogit;
    RowState mine = state_at(lane);
    float reference = fmaxf(sink, mine.reference);
    for (int i = lane + 32; i < count; i += 32) reference = fmaxf(reference, state_at(i).reference);
    for (int step = 1; step < 32; step *= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
    }
    float sum = has_sink && lane == 0 ? ptx::Exp2(sink - reference) : 0.0f, mass = 0.0f;
    float4 history[kQuads] = {}, plain[kQuads] = {};
    for (int first = 0; first < count; first += 32) {
      if (first > 0) mine = state_at(first + lane);
      const float weight = ptx::Exp2(mine.reference - reference);
      sum = fmaf(weight, mine.sum, sum);
      if (first + lane < s.int2_count) mass = fmaf(weight, mine.sum, mass);
      // History first, then BF16: two loops, so that both sums stay in registers.
      const int last = min(32, count - first);
      const int middle = min(last, max(0, s.int2_count - first));
#pragma unroll 8
      for (int i = 0; i < middle; ++i) {
        AddPartial(s.int2_first + first + i, row, __shfl_sync(~0u, weight, i), history);
      }
      for (int i = middle; i < last; ++i) {
        AddPartial(segment_at(first + i), row, __shfl_sync(~0u, weight, i), plain);
      }
    }
    for (int step = 1; step < 32; step *= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      mass += __shfl_xor_sync(~0u, mass, step);
    }
    if (lane == 0) row_[slot] = {rows_.IndexOf(k_, s.sequence, s.head, row), reference, sum};
    StageRow(slot, s.head, mass, history, plain);
  }

  static constexpr int kQuads = (T::kDim + 127) / 128;  // of 4 channels, per lane
  __device__ static __forceinline__ int QuadOf(int q) { return 4 * (threadIdx.x % 32) + 128 * q; }

  __device__ __forceinline__ void AddPartial(int segment, int row, float weight,
                                             float4 (&sum)[kQuads]) const {
    const float* from =
        k_.workspace.partial + (static_cast<int64_t>(segment) * T::kRows + row) * T::kDim;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (QuadOf(q) >= T::kDim) continue;
      const float4 x = __ldcg(reinterpret_cast<const float4*>(from + QuadOf(q)));
      sum[q].x = fmaf(weight, x.x, sum[q].x);
      sum[q].y = fmaf(weight, x.y, sum[q].y);
      sum[q].z = fmaf(weight, x.z, sum[q].z);
      sum[q].w = fmaf(weight, x.w, sum[q].w);
    }
  }

  // Leaves a merged row, the mean added, for Unrotate, or as it is where there is no rotation.
  __device__ __forceinline__ void StageRow(int slot, int head, float mass,
                                           float4 (&history)[kQuads],
                                           const float4 (&plain)[kQuads]) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int channel = QuadOf(q);
      if (channel >= T::kDim) continue;
      float4& x = history[q];
      if (k_.p.mean_v != nullptr) {
        const float4 m = *reinterpret_cast<const float4*>(k_.p.mean_v + head * T::kDim + channel);
        x = make_float4(fmaf(mass, m.x, x.x), fmaf(mass, m.y, x.y), fmaf(mass, m.z, x.z),
                        fmaf(mass, m.w, x.w));
      }
      const int at = slot * kSplitStride + channel / 2;
      ptx::SplitBf16(x.x, x.y, high_ + at, low_ + at);
      ptx::SplitBf16(x.z, x.w, high_ + at + 1, low_ + at + 1);
      const int f = slot * kStageStride<T::kDim> + channel;
      if (k_.p.rotation_v == nullptr) *reinterpret_cast<float4*>(turned_ + f) = x;
      *reinterpret_cast<float4*>(plain_ + f) = plain[q];
    }
  }

  // Channels 8 n .. 8 n + 7 of the merged rows times R_V'.
  __device__ __forceinline__ void Unrotate(int head, int n) {
    const int lane = threadIdx.x % 32;
    const float* r = k_.p.rotation_v + static_cast<int64_t>(head) * T::kDim * T::kDim +
                     static_cast<int64_t>(8 * n + lane / 4) * T::kDim + lane % 4 * 2;
    float2 element[T::kSteps][2];
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      element[s][0] = *reinterpret_cast<const float2*>(r + 16 * s);
      element[s][1] = *reinterpret_cast<const float2*>(r + 16 * s + 8);
    }
    float acc[4] = {};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t a_high[4], a_low[4], high[2], low[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (lane / 4 + i % 2 * 8) * kSplitStride + 8 * s + lane % 4 + i / 2 * 4;
        a_high[i] = high_[at];
        a_low[i] = low_[at];
      }
      ptx::SplitBf16(element[s][0].x, element[s][0].y, &high[0], &low[0]);
      ptx::SplitBf16(element[s][1].x, element[s][1].y, &high[1], &low[1]);
      ptx::MmaBf16(acc, a_high, high[0], high[1]);
      ptx::MmaBf16(acc, a_high, low[0], low[1]);
      ptx::MmaBf16(acc, a_low, high[0], high[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(turned_ + (lane / 4 + 8 * i) * kStageStride<T::kDim> + 8 * n +
                                 lane % 4 * 2) = make_float2(acc[2 * i], acc[2 * i + 1]);
    }
  }

  // Adds the BF16 part, divides by the softmax sum and writes the output.
  __device__ __forceinline__ void StoreRow(int slot) const {
    const PassRow at = row_[slot];
    if (at.index < 0) return;
    const float inverse = at.sum > 0.0f ? 1.0f / at.sum : 0.0f;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int channel = QuadOf(q);
      if (channel >= T::kDim) continue;
      const int f = slot * kStageStride<T::kDim> + channel;
      const float4 x = *reinterpret_cast<const float4*>(turned_ + f);
      const float4 y = *reinterpret_cast<const float4*>(plain_ + f);
      const float4 sum = make_float4((x.x + y.x) * inverse, (x.y + y.y) * inverse,
                                     (x.z + y.z) * inverse, (x.w + y.w) * inverse);
      if (k_.p.out_type == OutType::kF32) {
        *reinterpret_cast<float4*>(static_cast<float*>(k_.p.out) + at.index * T::kDim + channel) =
            sum;
      } else {
        *reinterpret_cast<uint2*>(static_cast<Bf16*>(k_.p.out) + at.index * T::kDim + channel) =
            make_uint2(ptx::PackBf16(sum.x, sum.y), ptx::PackBf16(sum.z, sum.w));
      }
    }
    if (threadIdx.x % 32 == 0 && k_.p.lse != nullptr) {
      k_.p.lse[at.index] = (at.reference + log2f(at.sum)) / kLog2E;
    }
  }

  const DecodeKernelParams& k_;
  const QueryRows rows_;
  float* turned_;   // [kPassRows] rows: the INT2 part in the model's basis
  float* plain_;    // the BF16 part
  uint32_t* high_;  // the INT2 part, rotated, in two bf16 parts
  uint32_t* low_;
  PassRow* row_;  // [kPassRows]
  int* list_;     // count, then segments
};

}  // namespace crumb::kernels::cuda
