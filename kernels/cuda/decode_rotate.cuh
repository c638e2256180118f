// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode_int2.cuh"
#include "kernels/cuda/decode_traits.cuh"
#include "kernels/cuda/ptx.cuh"

// Products of query-sized rows with R and R' on the tensor cores, by the whole block. Both factors
// are split in bf16 parts, so the products are good to 2^-16.
namespace crumb::kernels::cuda {

inline constexpr int kPassRows = 16;  // rows of one product: the M side of a fragment

// Floats from one staged row to the next.
template <int kDim>
inline constexpr int kStageStride = kDim + 4;

// q' = q R_K of the block's INT2 segments, as fragments of bytes in the workspace.
template <class T>
class QueryRotation {
 public:
  __device__ __forceinline__ QueryRotation(const DecodeKernelParams& k, float* stage)
      : k_(k), rows_(k), stage_(stage), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  // Starts to load this warp's part of R_K of `head`: before copies that would queue ahead.
  __device__ __forceinline__ void Prefetch(int head) {
    if (k_.p.rotation_k == nullptr || warp_ >= T::kDim / 8) return;
    head_ = head;
    LoadColumns(head, warp_, kept_);
  }

  // By all threads of the block.
  __device__ __forceinline__ void Run(int segment, int segment_end) {
    constexpr int kPerPass = T::kRows < kPassRows ? kPassRows / T::kRows : 1;
    while (segment < segment_end) {
      // Up to kPerPass segments of one head; others between them are left out.
      int head = -1, count = 0;
      int taken[kPerPass];
#pragma unroll
      for (int i = 0; i < kPerPass; ++i) taken[i] = -1;
      for (; segment < segment_end && count < kPerPass; ++segment) {
        const Segment& s = k_.plan.segments[segment];
        if (s.kind != kSegmentInt2) continue;
        if (head >= 0 && s.head != head) break;
        head = s.head;
#pragma unroll
        for (int i = 0; i < kPerPass; ++i) {
          if (i == count) taken[i] = segment;
        }
        ++count;
      }
      if (count == 0) return;
      for (int row = 0; row < T::kRows; row += kPassRows) RotatePass<kPerPass>(taken, head, row);
    }
  }

 private:
  // The segment and query row behind row `slot` of a pass; segment -1 where there is none.
  struct PassRow {
    int segment;
    int row;
  };
  template <int kPerPass>
  __device__ __forceinline__ PassRow RowAt(const int (&taken)[kPerPass], int first_row, int slot) {
    PassRow at = {-1, first_row + slot % T::kRows};
#pragma unroll
    for (int i = 0; i < kPerPass; ++i) {
      if (i == slot / T::kRows) at.segment = taken[i];
    }
    return at;
  }

  template <int kPerPass>
  __device__ __forceinline__ void RotatePass(const int (&taken)[kPerPass], int head,
                                             int first_row) {
    const uint32_t* q[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const PassRow at = RowAt(taken, first_row, lane_ / 4 + 8 * i);
      q[i] = nullptr;
      if (at.segment >= 0 && at.row < rows_.columns) {
        const Segment& s = k_.plan.segments[at.segment];
        q[i] = reinterpret_cast<const uint32_t*>(
            k_.p.q + rows_.IndexOf(k_, s.sequence, s.head, at.row) * T::kDim);
      }
    }
    if (k_.p.rotation_k == nullptr) {
      for (int n = warp_; n < T::kDim / 8; n += k_.launch.warps) CopyColumns(q, n);
    } else if (warp_ < T::kDim / 8) {
      if (head != head_) Prefetch(head);
      MultiplyColumns(q, kept_, warp_);
      for (int n = warp_ + k_.launch.warps; n < T::kDim / 8; n += k_.launch.warps) {
        float r[T::kSteps][4];
        LoadColumns(head, n, r);
        MultiplyColumns(q, r, n);
      }
    }
    __syncthreads();
    for (int slot = warp_; slot < kPassRows; slot += k_.launch.warps) {
      const PassRow at = RowAt(taken, first_row, slot);
      if (at.segment >= 0) StoreRow(at.segment, at.row, stage_ + slot * kStageStride<T::kDim>);
    }
    __syncthreads();
  }

  // The elements of R_K that a lane needs for channels 8 n .. 8 n + 7.
  __device__ __forceinline__ void LoadColumns(int head, int n, float (&r)[T::kSteps][4]) {
    const float* m = k_.p.rotation_k + static_cast<int64_t>(head) * T::kDim * T::kDim +
                     (lane_ % 4 * 2) * T::kDim + 8 * n + lane_ / 4;
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      r[s][0] = m[16 * s * T::kDim], r[s][1] = m[(16 * s + 1) * T::kDim];
      r[s][2] = m[(16 * s + 8) * T::kDim], r[s][3] = m[(16 * s + 9) * T::kDim];
    }
  }

  // Channels 8 n .. 8 n + 7 of the pass's rows.
  __device__ __forceinline__ void MultiplyColumns(const uint32_t* const (&q)[2],
                                                  const float (&r)[T::kSteps][4], int n) {
    float acc[4] = {};
    uint32_t a[T::kSteps][4];
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = Pair(q[i % 2], 8 * s + lane_ % 4 + i / 2 * 4);
    }
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t high[2], low[2];
      ptx::SplitBf16(r[s][0], r[s][1], &high[0], &low[0]);
      ptx::SplitBf16(r[s][2], r[s][3], &high[1], &low[1]);
      ptx::MmaBf16(acc, a[s], high[0], high[1]);
      ptx::MmaBf16(acc, a[s], low[0], low[1]);
    }
    StageColumns(n, acc);
  }

  __device__ __forceinline__ void CopyColumns(const uint32_t* const (&q)[2], int n) {
    const uint32_t x = Pair(q[0], 4 * n + lane_ % 4), y = Pair(q[1], 4 * n + lane_ % 4);
    const float acc[4] = {ptx::LowBf16(x), ptx::HighBf16(x), ptx::LowBf16(y), ptx::HighBf16(y)};
    StageColumns(n, acc);
  }

  __device__ __forceinline__ void StageColumns(int n, const float (&acc)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(stage_ + (lane_ / 4 + 8 * i) * kStageStride<T::kDim> + 8 * n +
                                 lane_ % 4 * 2) = make_float2(acc[2 * i], acc[2 * i + 1]);
    }
  }

  __device__ static __forceinline__ uint32_t Pair(const uint32_t* q, int i) {
    return q == nullptr ? 0 : q[i];
  }

  // Rounds a rotated row to 16 bits and stores its bytes and constants. One warp.
  __device__ __forceinline__ void StoreRow(int segment, int row, const float* x) {
    constexpr int kParts = T::kDim / 64, kPasses = (T::kDim + 127) / 128;
    float most = 0.0f;
    for (int i = lane_; i < T::kDim; i += 32) most = fmaxf(most, fabsf(x[i]));
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    // Both bytes are signed: 127 * 256 + 127 is the largest value.
    const float unit = most > 0x1p-100f && most < INFINITY ? 32600.0f / most : 1.0f;
    int sum[kPasses][2];  // of this lane's channels below and above 32 of the 64
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int part = 2 * pass + lane_ / 16;
      sum[pass][0] = sum[pass][1] = 0;
      if (part < kParts) StoreWords(segment, row, part, x, unit, sum[pass]);
      for (int step = 1; step < 16; step *= 2) {
        sum[pass][0] += __shfl_xor_sync(~0u, sum[pass][0], step);
        sum[pass][1] += __shfl_xor_sync(~0u, sum[pass][1], step);
      }
    }
    float* constant = k_.workspace.row_constant +
                      (static_cast<int64_t>(segment) * T::kRows + row) * (1 + T::kGroups);
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
      int group = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const int value = __shfl_sync(~0u, sum[part / 2][upper], part % 2 * 16);
          if ((2 * part + upper) * T::kGroups / (2 * kParts) == y) group += value;
        }
      }
      if (lane_ == 0) constant[1 + y] = static_cast<float>(group);
    }
    if (lane_ == 0) constant[0] = k_.log2_scale / unit;
  }

  // Four channels a lane: byte (upper, e) is channel 64 part + 32 upper + 8 q + 2 c + e. Codes of
  // odd q arrive times 4, so their query is a quarter.
  __device__ __forceinline__ void StoreWords(int segment, int row, int part, const float* x,
                                             float unit, int (&sum)[2]) {
    const int q = lane_ / 4 % 4, c = lane_ % 4;
    uint32_t high = 0, low = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const int upper = byte % 2, e = byte / 2;
      const int value = __float2int_rn(x[64 * part + 32 * upper + 8 * q + 2 * c + e] *
                                       (q % 2 == 0 ? unit : 0.25f * unit));
      const int rest = static_cast<int8_t>(value);
      sum[upper] += q % 2 == 0 ? value : 4 * value;
      high |= static_cast<uint32_t>((value - rest) / 256 & 0xff) << (8 * byte);
      low |= static_cast<uint32_t>(rest & 0xff) << (8 * byte);
    }
#pragma unroll
    for (int split = 0; split < T::kGroupSplit; ++split) {
      const uint32_t mask = T::kGroupSplit == 1 ? ~0u : 0x00ff00ffu << (8 * split);
      const int step = (part * T::kGroupSplit + split) * 2 + q % 2;
      StoreWord(segment, T::kPair ? 0 : row / 8 * 2, step, q / 2,
                4 * (T::kPair ? 2 * row : row % 8) + c, high & mask);
      StoreWord(segment, T::kPair ? 0 : row / 8 * 2 + 1, step, q / 2,
                4 * (T::kPair ? 2 * row + 1 : row % 8) + c, low & mask);
    }
  }

  // Word b of a lane's B fragment.
  __device__ __forceinline__ void StoreWord(int segment, int tile, int step, int b, int lane,
                                            uint32_t word) {
    const int64_t at = static_cast<int64_t>(segment) * T::kDotTiles + tile;
    k_.workspace
        .q_fragment[(at * (T::kDotSteps / 2) + step / 2) * 128 + lane * 4 + step % 2 * 2 + b] =
        word;
  }

  const DecodeKernelParams& k_;
  const QueryRows rows_;
  float* stage_;
  const int warp_;
  const int lane_;
  int head_ = -1;             // whose R_K is kept
  float kept_[T::kSteps][4];  // channels 8 warp_ .. 8 warp_ + 7
};

}  // namespace crumb::kernels::cuda
