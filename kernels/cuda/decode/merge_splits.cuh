// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/rotate_query.cuh"
#include "kernels/cuda/decode/store_partial.cuh"
#include "kernels/cuda/decode/traits.cuh"

// The merge of a problem's partial results into its output, in split order, by whichever block
// completes the last of them: the partial results of INT2 segments are summed and inverse-rotated,
// those of BF16 segments are added, and the sum is divided by the softmax sum.
//
// Counters of finished segments are zero between calls: the block that completes a problem sets its
// counter back. Partial results are visible to that block because the counter is incremented with
// acquire-release order after a barrier of the block that wrote them.
namespace crumb::kernels::cuda {

// Counts this block's segments and finishes the problems whose last segment it completed. A pass
// finishes several rows; it has up to kPlacesMax places, one for a row or for a part of a row's
// splits.
template <class T>
class SplitMerger {
 public:
  // `ring` is the block's slots, which are idle now.
  __device__ __forceinline__ SplitMerger(const DecodeKernelParams& k, char* ring)
      : k_(k), rows_(k) {
    const int bytes = k.launch.warps * k.launch.stages * static_cast<int>(k.launch.slot_bytes);
    places_ = PlacesFor(bytes - kRotationBytes);
    copies_rotation_ = places_ > 0;
    // The smallest ring lacks a few bytes; the staging area behind it is idle too.
    if (!copies_rotation_) places_ = max(kPassRows, PlacesFor(bytes));
    history_ = reinterpret_cast<float*>(ring);
    bf16_part_ = history_ + places_ * kStageStride<T::kDim>;
    inverse_rotated_ = bf16_part_ + places_ * kStageStride<T::kDim>;
    high_ = reinterpret_cast<uint32_t*>(inverse_rotated_ +
                                        kInnerParts * places_ * kStageStride<T::kDim>);
    low_ = high_ + places_ * kSplitStride;
    row_ = reinterpret_cast<PassRow*>(low_ + places_ * kSplitStride);
    list_ = reinterpret_cast<FinishedProblem*>(row_ + places_);
    count_ = reinterpret_cast<int*>(list_ + kListMax);
    rotation_ = reinterpret_cast<float*>(count_ + 4);
  }

  __device__ __forceinline__ void Run(int segment, int segment_end) {
    if (segment >= segment_end) return;
    for (; segment < segment_end; segment += kListMax) {
      const int count = CountIn(segment, min(segment + kListMax, segment_end));
      for (int i = 0; i < count;) {
        // Problems of one KV head share a pass. The order in which a row is summed depends on the
        // problem's splits alone, not on which problems are completed together.
        const bool few = list_[i].splits() <= kFewSplits;
        const int parts =
            few ? 1 : min(kPassRows / kRowsAtOnce, max(1, k_.launch.warps / T::kRows));
        const int most = places_ / (kRowsAtOnce * parts);
        int problems = 1;
        while (problems < most && i + problems < count &&
               list_[i + problems].head == list_[i].head &&
               (list_[i + problems].splits() <= kFewSplits) == few) {
          ++problems;
        }
        for (int row = 0; row < T::kRows; row += kRowsAtOnce) {
          FinishPass(list_ + i, problems, parts, row);
        }
        i += problems;
      }
    }
  }

 private:
  static constexpr int kListMax = 128;
  static constexpr int kPlacesMax = 3 * kPassRows;
  // rows of a problem per pass
  static constexpr int kRowsAtOnce = T::kRows < kPassRows ? T::kRows : kPassRows;
  static constexpr int kFewSplits = 4;
  static constexpr int kSplitStride = T::kDim / 2 + 4;  // words from one row to the next
  // Floats from one row of R_V to the next, padded so that eight lanes load from different banks.
  static constexpr int kRotationStride = T::kDim + 16;
  // Parts that the sum over inner channels is divided into, as far as there is room.
  static constexpr int kInnerParts = T::kDim <= 128 ? 2 : 1;
  static constexpr int kQuads = (T::kDim + 127) / 128;  // groups of 4 channels per lane
  static constexpr int kBatch = kQuads == 1 ? 8 : 4;    // splits of a row that are loaded together
  // rows that a warp merges at once if they have few splits
  static constexpr int kRowsOfFew = kQuads == 1 ? 4 : 2;
  static constexpr int kRotationBytes = T::kDim * kRotationStride * 4;

  struct FinishedProblem {
    int sequence;
    int head;
    int int2_first;
    int int2_count;
    int bf16_first;
    int bf16_count;

    __device__ __forceinline__ int splits() const { return int2_count + bf16_count; }
  };

  // A row of the pass: the place of its output and the sum that it is divided by.
  struct PassRow {
    int64_t index;  // index of the row in the output, -1: none
    float running_max;
    float sum;
    float mass;  // the history's part of the sum
  };

  // Returns the largest number of places, in steps of kPassRows, that fit `bytes` beside the list.
  __device__ static __forceinline__ int PlacesFor(int bytes) {
    constexpr int kPlaceBytes = (2 + kInnerParts) * kStageStride<T::kDim> * 4 +
                                2 * kSplitStride * 4 + static_cast<int>(sizeof(PassRow));
    bytes -= kListMax * static_cast<int>(sizeof(FinishedProblem)) + 16;
    int places = kPlacesMax;
    while (places > 0 && places * kPlaceBytes > bytes) places -= kPassRows;
    return places;
  }

  // Lists the problems that this block completes. Returns their number, to all threads.
  __device__ __forceinline__ int CountIn(int segment, int segment_end) {
    const int lane = threadIdx.x % 32;
    Segment s;
    const auto look = [&](int first) {
      s.kind = kSegmentNone;
      if (first + lane < segment_end) s = k_.plan.segments[first + lane];
    };
    if (threadIdx.x < 32) look(segment);
    __syncthreads();  // all warps have written their sums and no longer read the previous list
    if (threadIdx.x < 32) {
      int count = 0;
#pragma unroll 1
      for (int first = segment; first < segment_end; first += 32) {
        if (first > segment) look(first);
        bool last = false;
        FinishedProblem problem;
        if (s.kind != kSegmentNone) {
          problem = {s.sequence, s.head, s.int2_first, s.int2_count, s.bf16_first, s.bf16_count};
          last =
              ptx::AddReleaseAcquire(k_.workspace.arrivals + s.problem, 1) == problem.splits() - 1;
          if (last) k_.workspace.arrivals[s.problem] = 0;
        }
        const uint32_t mask = __ballot_sync(~0u, last);
        if (last) list_[count + __popc(mask & ((1u << lane) - 1))] = problem;
        count += __popc(mask);
      }
      if (lane == 0) *count_ = count;
    }
    __syncthreads();
    return *count_;
  }

  // Finishes rows first_row and following of `count` problems, with `parts` places per row.
  __device__ __forceinline__ void FinishPass(const FinishedProblem* problems, int count, int parts,
                                             int first_row) {
    const int warp = threadIdx.x / 32, head = problems->head;
    const bool rotated = k_.p.rotation_v != nullptr;
    if (rotated && copies_rotation_ && head != head_) CopyRotation(head);
    const int slots = count * kRowsAtOnce;
    if (problems->splits() <= kFewSplits) {
      for (int slot = kRowsOfFew * warp; slot < slots; slot += kRowsOfFew * k_.launch.warps) {
        MergeFew(slot, problems[slot / kRowsAtOnce], first_row + slot % kRowsAtOnce);
      }
    } else {
      for (int place = warp; place < slots * parts; place += k_.launch.warps) {
        const int slot = place / parts;
        MergeRow(slot, place % parts, parts, problems[slot / kRowsAtOnce],
                 first_row + slot % kRowsAtOnce);
      }
    }
    __syncthreads();
    CombineRows(head, slots, parts);
    ptx::WaitCopies<0>();
    __syncthreads();
    if (rotated) {
      const float* from = copies_rotation_
                              ? rotation_
                              : k_.p.rotation_v + static_cast<int64_t>(head) * T::kDim * T::kDim;
      const int stride = copies_rotation_ ? kRotationStride : T::kDim;
#pragma unroll 1
      for (int i = warp; i < T::kDim / 8 * kInnerParts; i += k_.launch.warps) {
        InverseRotate(from, stride, i / kInnerParts, i % kInnerParts, slots);
      }
      __syncthreads();
    }
    for (int slot = warp; slot < slots; slot += k_.launch.warps) {
      StoreRow(slot, parts);
    }
    __syncthreads();
  }

  __device__ __forceinline__ RowState StateOf(int segment, int row) const {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(k_.workspace.row_state) +
                            static_cast<int64_t>(segment) * T::kRows + row);
    return {x.x, x.y};
  }

  // Merges segments part, part + parts, ... of one row, history and BF16 rows apart.
  __device__ __forceinline__ void MergeRow(int slot, int part, int parts,
                                           const FinishedProblem& problem, int row) {
    const int lane = threadIdx.x % 32;
    if (row >= rows_.count) {
      if (lane == 0 && part == 0) row_[slot].index = -1;
      return;
    }
    const FinishedProblem s = problem;
    const int count = s.int2_count + s.bf16_count;
    const auto segment_at = [&](int i) {
      return i < s.int2_count ? s.int2_first + i : s.bf16_first + i - s.int2_count;
    };
    const auto state_at = [&](int i) {
      return i < count ? StateOf(segment_at(i), row) : RowState{kNoLogit, 0.0f};
    };
    const auto load = [&](int first, int end, float4(&x)[kBatch][kQuads]) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j * parts < end) LoadPartial(segment_at(first + j * parts), row, x[j]);
      }
    };
    // Both loads are issued before either result is needed.
    RowState mine = state_at(lane);
    float4 x[kBatch][kQuads];
    load(part, min(32, count), x);
    const bool has_sink = k_.p.sink_logit != nullptr;
    const float sink =
        has_sink ? k_.p.sink_logit[s.head * rows_.heads + rows_.HeadOf(row)] * kLog2E : kNoLogit;
    float running_max = fmaxf(sink, mine.running_max);
    for (int i = lane + 32; i < count; i += 32)
      running_max = fmaxf(running_max, state_at(i).running_max);
    for (int step = 1; step < 32; step *= 2) {
      running_max = fmaxf(running_max, __shfl_xor_sync(~0u, running_max, step));
    }
    float sum = has_sink && lane == 0 ? ptx::Exp2(sink - running_max) : 0.0f, mass = 0.0f;
    float4 history[kQuads] = {}, bf16_part[kQuads] = {};
    for (int base = 0; base < count; base += 32) {
      if (base > 0) mine = state_at(base + lane);
      const float weight = ptx::Exp2(mine.running_max - running_max);
      sum = fmaf(weight, mine.sum, sum);
      if (base + lane < s.int2_count) mass = fmaf(weight, mine.sum, mass);
      const int end = min(base + 32, count);
      for (int first = base + part; first < end; first += kBatch * parts) {
        if (first != part) load(first, end, x);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int i = first + j * parts;
          if (i >= end) break;
          const float w = __shfl_sync(~0u, weight, i % 32);
          AddWeighted(i < s.int2_count ? w : 0.0f, x[j], history);
          AddWeighted(i < s.int2_count ? 0.0f : w, x[j], bf16_part);
        }
      }
    }
    for (int step = 1; step < 32; step *= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      mass += __shfl_xor_sync(~0u, mass, step);
    }
    if (lane == 0 && part == 0) {
      row_[slot] = {rows_.IndexOf(k_, s.sequence, s.head, row), running_max, sum, mass};
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (QuadOf(q) >= T::kDim) continue;
      const int at = (slot * parts + part) * kStageStride<T::kDim> + QuadOf(q);
      *reinterpret_cast<float4*>(history_ + at) = history[q];
      *reinterpret_cast<float4*>(bf16_part_ + at) = bf16_part[q];
    }
  }

  // Merges kRowsOfFew rows of a problem of at most kFewSplits segments; all loads are issued at
  // once.
  __device__ __forceinline__ void MergeFew(int slot, const FinishedProblem& problem, int row) {
    const int lane = threadIdx.x % 32, mine = lane % kRowsOfFew;
    const FinishedProblem s = problem;
    const int count = s.splits(), split = lane / kRowsOfFew;
    const auto segment_at = [&](int i) {
      return i < s.int2_count ? s.int2_first + i : s.bf16_first + i - s.int2_count;
    };
    const RowState state =
        split < count ? StateOf(segment_at(split), row + mine) : RowState{kNoLogit, 0.0f};
    float4 x[kFewSplits][kRowsOfFew][kQuads];
#pragma unroll
    for (int i = 0; i < kFewSplits; ++i) {
#pragma unroll
      for (int r = 0; r < kRowsOfFew; ++r) {
        if (i < count) LoadPartial(segment_at(i), row + r, x[i][r]);
      }
    }
    const bool exists = row + mine < rows_.count;
    const bool has_sink = k_.p.sink_logit != nullptr && exists;
    const float sink =
        has_sink ? k_.p.sink_logit[s.head * rows_.heads + rows_.HeadOf(row + mine)] * kLog2E
                 : kNoLogit;
    float running_max = fmaxf(sink, state.running_max);
    for (int step = kRowsOfFew; step < 32; step *= 2) {
      running_max = fmaxf(running_max, __shfl_xor_sync(~0u, running_max, step));
    }
    const float weight = ptx::Exp2(state.running_max - running_max);
    float sum = weight * state.sum, mass = split < s.int2_count ? sum : 0.0f;
    for (int step = kRowsOfFew; step < 32; step *= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      mass += __shfl_xor_sync(~0u, mass, step);
    }
    if (has_sink) sum += ptx::Exp2(sink - running_max);
    if (split == 0) {
      row_[slot + mine] = {exists ? rows_.IndexOf(k_, s.sequence, s.head, row + mine) : int64_t{-1},
                           running_max, sum, mass};
    }
    // One accumulator suffices, because the history's segments come first.
    float4 part[kRowsOfFew][kQuads] = {};
    const auto store = [&](float* to) {
#pragma unroll
      for (int r = 0; r < kRowsOfFew; ++r) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          if (QuadOf(q) < T::kDim) {
            *reinterpret_cast<float4*>(to + (slot + r) * kStageStride<T::kDim> + QuadOf(q)) =
                part[r][q];
          }
          part[r][q] = {};
        }
      }
    };
    if (s.int2_count == 0) store(history_);
#pragma unroll
    for (int i = 0; i < kFewSplits; ++i) {
      if (i < count) {
#pragma unroll
        for (int r = 0; r < kRowsOfFew; ++r) {
          AddWeighted(__shfl_sync(~0u, weight, kRowsOfFew * i + r), x[i][r], part[r]);
        }
      }
      if (i == s.int2_count - 1) store(history_);
    }
    store(bf16_part_);
  }

  __device__ static __forceinline__ int QuadOf(int q) { return 4 * (threadIdx.x % 32) + 128 * q; }

  __device__ __forceinline__ void LoadPartial(int segment, int row, float4 (&x)[kQuads]) const {
    const float* from =
        k_.workspace.partial + (static_cast<int64_t>(segment) * T::kRows + row) * T::kDim;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (QuadOf(q) < T::kDim) x[q] = __ldcg(reinterpret_cast<const float4*>(from + QuadOf(q)));
    }
  }

  __device__ static __forceinline__ void AddWeighted(float weight, const float4 (&x)[kQuads],
                                                     float4 (&sum)[kQuads]) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      sum[q].x = fmaf(weight, x[q].x, sum[q].x);
      sum[q].y = fmaf(weight, x[q].y, sum[q].y);
      sum[q].z = fmaf(weight, x[q].z, sum[q].z);
      sum[q].w = fmaf(weight, x[q].w, sum[q].w);
    }
  }

  // Sums the parts of each row and adds the mean. Leaves the result for InverseRotate or, without
  // rotation, in its place.
  __device__ __forceinline__ void CombineRows(int head, int slots, int parts) {
    constexpr int kPieces = T::kDim / 4;
    for (int i = threadIdx.x; i < slots * kPieces; i += blockDim.x) {
      const int slot = i / kPieces, channel = i % kPieces * 4;
      if (row_[slot].index < 0) continue;
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (k_.p.mean_v != nullptr) {
        const float mass = row_[slot].mass;
        const float4 m = *reinterpret_cast<const float4*>(k_.p.mean_v + head * T::kDim + channel);
        x = make_float4(mass * m.x, mass * m.y, mass * m.z, mass * m.w);
      }
      for (int part = 0; part < parts; ++part) {
        const float4 y = *reinterpret_cast<const float4*>(
            history_ + (slot * parts + part) * kStageStride<T::kDim> + channel);
        x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
      }
      const int at = slot * kSplitStride + channel / 2;
      ptx::SplitBf16(x.x, x.y, high_ + at, low_ + at);
      ptx::SplitBf16(x.z, x.w, high_ + at + 1, low_ + at + 1);
      if (k_.p.rotation_v == nullptr) {
        float* to = inverse_rotated_ + slot * kStageStride<T::kDim> + channel;
        *reinterpret_cast<float4*>(to) = x;
#pragma unroll
        for (int part = 1; part < kInnerParts; ++part) {
          *reinterpret_cast<float4*>(to + part * places_ * kStageStride<T::kDim>) =
              make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
    }
  }

  // Starts copying a head's R_V to shared memory.
  __device__ __forceinline__ void CopyRotation(int head) {
    constexpr int kPieces = T::kDim / 4;  // 16-byte pieces of a row
    const float* from = k_.p.rotation_v + static_cast<int64_t>(head) * T::kDim * T::kDim;
    const uint32_t to = ptx::SharedAddress(rotation_);
#pragma unroll 2
    for (int i = threadIdx.x; i < T::kDim * kPieces; i += blockDim.x) {
      ptx::CopyAsync16(to + 4 * (i / kPieces * kRotationStride) + 16 * (i % kPieces), from + 4 * i);
    }
    ptx::CommitCopies();
    head_ = head;
  }

  // Multiplies the first `rows` merged rows by R_V': channels 8 n to 8 n + 7 of a part of the sum
  // over inner channels. A lane loads four neighbouring channels of 16: an MMA sums channels in any
  // order.
  __device__ __forceinline__ void InverseRotate(const float* rotation, int stride, int n, int part,
                                                int rows) {
    constexpr int kSteps = T::kSteps / kInnerParts;
    const int lane = threadIdx.x % 32;
    const float* from = rotation + (8 * n + lane / 4) * stride + lane % 4 * 4 + 16 * kSteps * part;
    float4 r[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) r[s] = *reinterpret_cast<const float4*>(from + 16 * s);
    uint32_t high[kSteps][2], low[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      ptx::SplitBf16(r[s].x, r[s].y, &high[s][0], &low[s][0]);
      ptx::SplitBf16(r[s].z, r[s].w, &high[s][1], &low[s][1]);
    }
#pragma unroll 1
    for (int first = 0; first < rows; first += kPassRows) {
      float acc[3][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t a_high[4], a_low[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at =
              (first + lane / 4 + 8 * i) * kSplitStride + 8 * (kSteps * part + s) + lane % 4 * 2;
          const uint2 x = *reinterpret_cast<const uint2*>(high_ + at);
          const uint2 y = *reinterpret_cast<const uint2*>(low_ + at);
          a_high[i] = x.x, a_high[i + 2] = x.y;
          a_low[i] = y.x, a_low[i + 2] = y.y;
        }
        ptx::MmaBf16(acc[0], a_high, high[s][0], high[s][1]);
        ptx::MmaBf16(acc[1], a_high, low[s][0], low[s][1]);
        ptx::MmaBf16(acc[2], a_low, high[s][0], high[s][1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 x;
        x.x = acc[0][2 * i] + (acc[1][2 * i] + acc[2][2 * i]);
        x.y = acc[0][2 * i + 1] + (acc[1][2 * i + 1] + acc[2][2 * i + 1]);
        *reinterpret_cast<float2*>(
            inverse_rotated_ + (part * places_ + first + lane / 4 + 8 * i) * kStageStride<T::kDim> +
            8 * n + lane % 4 * 2) = x;
      }
    }
  }

  // Adds the BF16 part, divides by the softmax sum and writes the output.
  __device__ __forceinline__ void StoreRow(int slot, int parts) const {
    const PassRow at = row_[slot];
    if (at.index < 0) return;
    const float inverse = at.sum != 0.0f ? 1.0f / at.sum : 0.0f;  // NaN stays
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int channel = QuadOf(q);
      if (channel >= T::kDim) continue;
      const int f = slot * kStageStride<T::kDim> + channel;
      float4 sum = *reinterpret_cast<const float4*>(inverse_rotated_ + f);
#pragma unroll
      for (int part = 1; part < kInnerParts; ++part) {
        const float4 x = *reinterpret_cast<const float4*>(
            inverse_rotated_ + part * places_ * kStageStride<T::kDim> + f);
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      for (int part = 0; part < parts; ++part) {
        const float4 y = *reinterpret_cast<const float4*>(
            bf16_part_ + (slot * parts + part) * kStageStride<T::kDim> + channel);
        sum = make_float4(sum.x + y.x, sum.y + y.y, sum.z + y.z, sum.w + y.w);
      }
      sum = make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
      if (k_.p.out_type == OutType::kF32) {
        *reinterpret_cast<float4*>(static_cast<float*>(k_.p.out) + at.index * T::kDim + channel) =
            sum;
      } else {
        *reinterpret_cast<uint2*>(static_cast<Bf16*>(k_.p.out) + at.index * T::kDim + channel) =
            make_uint2(ptx::PackBf16(sum.x, sum.y), ptx::PackBf16(sum.z, sum.w));
      }
    }
    if (threadIdx.x % 32 == 0 && k_.p.lse != nullptr) {
      k_.p.lse[at.index] = (at.running_max + log2f(at.sum)) / kLog2E;
    }
  }

  const DecodeKernelParams& k_;
  const QueryRows rows_;
  int places_;        // number of rows of a pass
  float* history_;    // [places] rows of the INT2 part in the rotated basis, a row's parts together
  float* bf16_part_;  // [places] rows of the BF16 part, likewise
  float* inverse_rotated_;  // [kInnerParts, places] rows of the INT2 part in the model's basis
  uint32_t* high_;          // the INT2 part in the rotated basis, split into two bf16 parts
  uint32_t* low_;
  PassRow* row_;           // [places]
  FinishedProblem* list_;  // [kListMax]
  int* count_;
  float* rotation_;       // R_V of head_
  bool copies_rotation_;  // whether there is room for it
  int head_ = -1;
};

}  // namespace crumb::kernels::cuda
