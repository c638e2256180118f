// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/decode_ptx.cuh"
#include "kernels/cuda/decode/int2_pages.cuh"
#include "kernels/cuda/decode/traits.cuh"

// Rotation of the query, q' = q R_K, on the tensor cores by a whole block, and its rounding to 16
// bits. R_K is split into two bf16 parts, so q' is accurate to 2^-16.
namespace crumb::kernels::cuda {

// Floats from one staged row to the next.
template <int kDim>
inline constexpr int kStageStride = kDim + 4;

// Stores word b of a lane's B fragment.
template <class T>
__device__ __forceinline__ void StoreQueryWord(uint32_t* fragment, int tile, int step, int b,
                                               int lane, uint32_t word) {
  fragment[(tile * (T::kDotSteps / 2) + step / 2) * 128 + lane * 4 + step % 2 * 2 + b] = word;
}

// A rotated query row rounded to 16 bits, as one warp holds it. Of each part of 64 channels 16
// lanes hold four each: byte (upper, e) is channel 64 part + 32 upper + 8 q + 2 c + e. Codes of odd
// q are operands multiplied by 4, so their query is divided by 4.
template <class T>
struct RoundedQuery {
  static constexpr int kParts = T::kDim / 64, kPasses = (T::kDim + 127) / 128;
  static constexpr int kErrorUnit = 256;  // resolution of rounding errors, in parts of a step
  int value[kPasses][4];
  int sum[kPasses][2];    // sums over this lane's channels below, and from, channel 32 of each 64
  int error[kPasses][2];  // rounding errors of the same

  __device__ __forceinline__ static int Q() { return threadIdx.x % 32 / 4 % 4; }
  __device__ __forceinline__ static int Part(int pass) { return 2 * pass + threadIdx.x % 32 / 16; }
  __device__ __forceinline__ static int Channel(int pass, int byte) {
    return 64 * Part(pass) + 32 * (byte % 2) + 8 * Q() + 2 * (threadIdx.x % 4) + byte / 2;
  }

  __device__ __forceinline__ RoundedQuery(const float* x, float unit) {
    const int weight = Q() % 2 == 0 ? 1 : 4;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      sum[pass][0] = sum[pass][1] = error[pass][0] = error[pass][1] = 0;
      if (Part(pass) >= kParts) continue;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const float exact = x[Channel(pass, byte)] * unit;
        const int rounded = __float2int_rn(exact * (weight == 1 ? 1.0f : 0.25f));
        value[pass][byte] = rounded;
        sum[pass][byte % 2] += weight * rounded;
        error[pass][byte % 2] +=
            __float2int_rn((exact - static_cast<float>(weight * rounded)) * kErrorUnit);
      }
    }
  }

  // Returns the warp's sum over the channels of group y.
  __device__ __forceinline__ static int SumOfGroup(const int (&of)[kPasses][2], int y) {
    int mine = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        if ((2 * Part(pass) + upper) * T::kGroups / (2 * kParts) == y) mine += of[pass][upper];
      }
    }
    return __reduce_add_sync(~0u, mine);
  }

  // Changes the rounding of channels of group y by one step each, so that their sum includes the
  // rounding errors: a key's minimum is multiplied by this sum. Returns the sum.
  __device__ __forceinline__ int KeepSum(int y) {
    constexpr int kWidth = T::kDim / T::kGroups, kEven = kWidth / 2;
    const int left_out = SumOfGroup(error, y);
    const int missing = (left_out + (left_out < 0 ? -kErrorUnit / 2 : kErrorUnit / 2)) / kErrorUnit;
    const int each = missing / kEven, more = missing - each * kEven;
    if (Q() % 2 == 0) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
          const int channel = Channel(pass, byte), within = channel % kWidth;
          if (Part(pass) >= kParts || channel / kWidth != y) continue;
          const bool takes = within / 16 * 8 + within % 8 < abs(more);
          value[pass][byte] += each + (!takes ? 0 : more < 0 ? -1 : 1);
        }
      }
    }
    return SumOfGroup(sum, y) + missing;
  }

  // Stores the values as high and low bytes of MMA operands, for query row `row` of the block.
  __device__ __forceinline__ void Store(uint32_t* fragment, int row) const {
    const int q = Q(), c = threadIdx.x % 4, tile = row / 8 * 2, column = row % 8;
    const bool interleaved = T::Interleaved(row / 8);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (Part(pass) >= kParts) continue;
      uint32_t high = 0, low = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int rest = static_cast<int8_t>(value[pass][byte]);
        high |= static_cast<uint32_t>((value[pass][byte] - rest) / 256 & 0xff) << (8 * byte);
        low |= static_cast<uint32_t>(rest & 0xff) << (8 * byte);
      }
#pragma unroll
      for (int split = 0; split < T::kGroupSplit; ++split) {
        const uint32_t mask = T::kGroupSplit == 1 ? ~0u : 0x00ff00ffu << (8 * split);
        const int step = (Part(pass) * T::kGroupSplit + split) * 2 + q % 2;
        StoreQueryWord<T>(fragment, tile, step, q / 2, 4 * (interleaved ? 2 * column : column) + c,
                          high & mask);
        StoreQueryWord<T>(fragment, interleaved ? tile : tile + 1, step, q / 2,
                          4 * (interleaved ? 2 * column + 1 : column) + c, low & mask);
      }
    }
  }
};

// Rounds a rotated row to 16 bits and stores its bytes and constants (RotatedQuery). One warp
// processes a row.
template <class T>
__device__ __forceinline__ void QuantizeQueryRow(const float* x, int row, float log2_scale,
                                                 uint32_t* fragment, float* constant) {
  const int lane = threadIdx.x % 32;
  // The bits of floats that are not negative have the order of the floats, with NaN above infinity.
  uint32_t bits = 0;
  for (int i = lane; i < T::kDim; i += 32) bits = max(bits, __float_as_uint(fabsf(x[i])));
  if (lane / 8 % 2 == 1) bits = __float_as_uint(0.25f * __uint_as_float(bits));  // odd q
  const float most = __uint_as_float(__reduce_max_sync(~0u, bits));
  const bool finite = most < INFINITY;
  // Both bytes are signed: 127 * 256 + 127 is the largest value.
  const float unit = !finite ? 0.0f : most > 0x1p-100f ? 32600.0f / most : 1.0f;
  RoundedQuery<T> query(x, unit);
  float* own = constant + row * (1 + T::kGroups);
  // After rounding a row that is not finite would look finite, so its factor makes all logits NaN.
  if (lane == 0) own[0] = finite ? log2_scale / unit : __int_as_float(0x7fffffff);
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    const int sum = query.KeepSum(y);
    if (lane == 0) own[1 + y] = static_cast<float>(sum);
  }
  query.Store(fragment, row);
}

// Computes q' = q R_K for the block's INT2 segments and stores it as byte fragments in the
// workspace. A warp multiplies 32 output channels by a part of the input channels; R_K is loaded in
// whole cache lines.
template <class T>
class QueryRotation {
 public:
  // `stage` has room for kPassRows rows of kStageStride floats.
  __device__ __forceinline__ QueryRotation(const DecodeKernelParams& k, float* stage)
      : k_(k), rows_(k), stage_(stage), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {
    splits_ = kStepPairs;
    while (splits_ > 1 && splits_ * kChannelBlocks > k.launch.warps) splits_ /= 2;
  }

  // Starts loading all that the first pass needs except the query, before copies of tiles are
  // issued.
  __device__ __forceinline__ void Prefetch(int segment, int segment_end, int head) {
    LoadSegments(segment, segment_end);
    if (k_.p.rotation_k == nullptr || warp_ >= kChannelBlocks * splits_) return;
    head_ = head;
    const int step_pairs = kStepPairs / splits_;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (i < step_pairs) {
        LoadStepPair(head, warp_ % kChannelBlocks, warp_ / kChannelBlocks * step_pairs + i,
                     kept_[i]);
      }
    }
  }

  // Starts loading the query rows of the first pass.
  __device__ __forceinline__ void PrefetchQuery() {
    pass_ = NextPass();
    StageQuery(0);
    staged_ = true;
  }

  // Rotates the queries of segments [segment, segment_end). All threads of the block call it.
  __device__ __forceinline__ void Run(int segment, int segment_end) {
    for (bool first = true; segment < segment_end; segment += 32, first = false) {
      if (!first) {
        LoadSegments(segment, segment_end);
        pass_ = NextPass();
        staged_ = false;
      }
      while (pass_.count > 0) {
        for (int row = 0; row < T::kRows; row += kPassRows) RotatePass(row);
        pass_ = NextPass();
      }
    }
  }

 private:
  static constexpr int kChannelBlocks = T::kDim / 32;
  static constexpr int kStepPairs = T::kSteps / 2;  // pairs of steps: 32 input channels
  static constexpr int kKept =
      kStepPairs < 2 ? kStepPairs : 2;  // step pairs of a part that are loaded ahead
  // Parts per warp; more than one only where a warp does not divide its channels with others.
  static constexpr int kRounds = (kChannelBlocks + kWorkerWarps - 1) / kWorkerWarps;
  static constexpr int kPerPass = T::kRows < kPassRows ? kPassRows / T::kRows : 1;
  static constexpr int kQueryStride = 2 * T::kDim + 16;  // bytes from one query row to the next

  // The segments whose rows are rotated together: the lanes that hold them, one per byte.
  struct Pass {
    int count;
    uint32_t lanes;
    int head;
  };

  // Lane i loads segment first + i.
  __device__ __forceinline__ void LoadSegments(int first, int end) {
    first_ = first;
    bool int2 = false;
    if (first + lane_ < end) {
      const Segment& s = k_.plan.segments[first + lane_];
      int2 = s.kind == kSegmentInt2;
      sequence_ = s.sequence;
      segment_head_ = s.head;
    }
    left_ = __ballot_sync(~0u, int2);
  }

  // Takes up to kPerPass segments of one head.
  __device__ __forceinline__ Pass NextPass() {
    Pass pass = {0, 0, 0};
    while (left_ != 0 && pass.count < kPerPass) {
      const int lane = __ffs(left_) - 1, head = __shfl_sync(~0u, segment_head_, lane);
      if (pass.count > 0 && head != pass.head) break;
      pass.lanes |= lane << (8 * pass.count);
      pass.head = head;
      ++pass.count;
      left_ &= left_ - 1;
    }
    return pass;
  }

  // Copies the pass's query rows to the staging area. Rows that do not exist are zero.
  __device__ __forceinline__ void StageQuery(int first_row) {
    constexpr int kPieces = T::kDim / 8;  // 16-byte pieces of a row
    if (pass_.count == 0) return;
    for (int i = threadIdx.x; i < kPassRows * kPieces; i += blockDim.x) {
      const int slot = i / kPieces, at = slot / T::kRows, row = first_row + slot % T::kRows;
      const int sequence = __shfl_sync(~0u, sequence_, pass_.lanes >> (8 * at) & 0xff);
      const uint32_t to = ptx::SharedAddress(stage_) + slot * kQueryStride + i % kPieces * 16;
      if (at < pass_.count && row < rows_.count) {
        ptx::CopyAsync16(to, static_cast<const Bf16*>(k_.p.q) +
                                 rows_.IndexOf(k_, sequence, pass_.head, row) * T::kDim +
                                 i % kPieces * 8);
      } else {
        ptx::StoreShared128(to, make_uint4(0, 0, 0, 0));
      }
    }
    ptx::CommitCopies();
  }

  __device__ __forceinline__ void RotatePass(int first_row) {
    if (!staged_) StageQuery(first_row);
    staged_ = false;
    ptx::WaitCopies<0>();
    __syncthreads();
    const bool rotate = k_.p.rotation_k != nullptr;
    const int splits = rotate ? splits_ : 1;
    float acc[kRounds][4][4] = {};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int part = warp_ + i * k_.launch.warps;
      if (part >= kChannelBlocks * splits) continue;
      if (rotate) {
        MultiplyPart(part % kChannelBlocks, part / kChannelBlocks, acc[i]);
      } else {
        CopyPart(part % kChannelBlocks, acc[i]);
      }
    }
    __syncthreads();  // the results replace the query rows
    for (int split = 0; split < splits; ++split) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int part = warp_ + i * k_.launch.warps;
        if (part / kChannelBlocks == split) AddChannels(part % kChannelBlocks, split > 0, acc[i]);
      }
      __syncthreads();
    }
    for (int slot = warp_; slot < kPassRows; slot += k_.launch.warps) {
      const int at = slot / T::kRows;
      if (at >= pass_.count) break;
      const int64_t segment = first_ + (pass_.lanes >> (8 * at) & 0xff);
      QuantizeQueryRow<T>(stage_ + slot * kStageStride<T::kDim>, first_row + slot % T::kRows,
                          k_.log2_scale, k_.workspace.q_fragment + segment * T::kFragmentWords,
                          k_.workspace.row_constant + segment * T::kRows * (1 + T::kGroups));
    }
    __syncthreads();
  }

  // Loads a lane's part of R_K: rows 32 step_pair to 32 step_pair + 31, channels 32 block to 32
  // block + 31.
  __device__ __forceinline__ void LoadStepPair(int head, int block, int step_pair,
                                               float4 (&r)[2][4]) {
    const float* m = k_.p.rotation_k + static_cast<int64_t>(head) * T::kDim * T::kDim +
                     (32 * step_pair + lane_ % 4 * 2) * T::kDim + 32 * block + lane_ / 4 * 4;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        r[s][i] = *reinterpret_cast<const float4*>(m + (16 * s + i / 2 * 8 + i % 2) * T::kDim);
      }
    }
  }

  // Accumulates into acc[e] channels 32 block + 4 n + e, where n is the MMA's column.
  __device__ __forceinline__ void MultiplyPart(int block, int split, float (&acc)[4][4]) {
    const int step_pairs = kStepPairs / splits_;
    const uint32_t query = ptx::SharedAddress(stage_) + lane_ % 16 * kQueryStride + lane_ / 16 * 16;
    const bool kept = pass_.head == head_ && block == warp_ % kChannelBlocks;
    if (!kept) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        if (i < step_pairs) LoadStepPair(pass_.head, block, split * step_pairs + i, kept_[i]);
      }
      head_ = block == warp_ % kChannelBlocks ? pass_.head : -1;
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (i < step_pairs) MultiplyStepPair(query + 64 * (split * step_pairs + i), kept_[i], acc);
    }
#pragma unroll 1
    for (int i = kKept; i < step_pairs; ++i) {
      float4 r[2][4];
      LoadStepPair(pass_.head, block, split * step_pairs + i, r);
      MultiplyStepPair(query + 64 * (split * step_pairs + i), r, acc);
    }
  }

  __device__ __forceinline__ void MultiplyStepPair(uint32_t query, const float4 (&r)[2][4],
                                                   float (&acc)[4][4]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t a[4];
      ptx::LoadMatrices(a, query + 32 * s);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = reinterpret_cast<const float*>(&r[s][i])[e];
        uint32_t high[2], rest[2];
        ptx::SplitBf16(x[0], x[1], &high[0], &rest[0]);
        ptx::SplitBf16(x[2], x[3], &high[1], &rest[1]);
        ptx::MmaBf16(acc[e], a, high[0], high[1]);
        ptx::MmaBf16(acc[e], a, rest[0], rest[1]);
      }
    }
  }

  // Copies the query unchanged if there is no rotation.
  __device__ __forceinline__ void CopyPart(int block, float (&acc)[4][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x =
          ptx::LoadShared128(ptx::SharedAddress(stage_) + (lane_ / 4 + 8 * i) * kQueryStride +
                             2 * (32 * block + lane_ % 4 * 8));
      const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const uint32_t w = word[c / 2];
        acc[c % 4][2 * i + c / 4] = c % 2 == 0 ? ptx::LowBf16(w) : ptx::HighBf16(w);
      }
    }
  }

  // Stores or adds 8 neighbouring channels of two rows.
  __device__ __forceinline__ void AddChannels(int block, bool add, const float (&acc)[4][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4* to = reinterpret_cast<float4*>(stage_ + (lane_ / 4 + 8 * i) * kStageStride<T::kDim> +
                                             32 * block + lane_ % 4 * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 x = add ? to[half] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const int at = 2 * i + half;
        to[half] =
            make_float4(x.x + acc[0][at], x.y + acc[1][at], x.z + acc[2][at], x.w + acc[3][at]);
      }
    }
  }

  const DecodeKernelParams& k_;
  const QueryRows rows_;
  float* stage_;  // query rows, then their rotated form
  const int warp_;
  const int lane_;
  int splits_;  // parts of the input channels
  // Lane i holds segment first_ + i; `left_` marks the INT2 segments that are still to be rotated.
  int first_;
  int sequence_ = 0;
  int segment_head_ = 0;
  uint32_t left_ = 0;
  Pass pass_;
  bool staged_ = false;
  int head_ = -1;             // KV head whose R_K is kept
  float4 kept_[kKept][2][4];  // the first step pairs of the warp's part
};

}  // namespace crumb::kernels::cuda
