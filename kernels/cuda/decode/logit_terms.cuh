// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/traits.cuh"

// The terms of an INT2 logit other than q' times the codes: the offset q . mu_K of a page's
// position block and the shift of a query head, which calls without soft cap add to the logits as
// biases, and soft cap and masks of the other calls.
namespace crumb::kernels::cuda {

// A segment's rotated query as QuantizeQueryRow stores it.
struct RotatedQuery {
  const uint32_t* fragment;  // [FragmentWords]
  // [rows, 1 + groups] factor from raw scores to log2 units, then sums of q'
  const float* constant;
};

// Terms of a row's INT2 logit under a soft cap.
struct RowTerms {
  float factor;  // raw score -> nats before the cap
  float offset;  // the page's position block's term, nats
  float shift;   // nats
};
template <class T>
__device__ __forceinline__ RowTerms TermsOf(const DecodeKernelParams& k, const Segment& segment,
                                            const RotatedQuery& rotated, int page, int row) {
  const QueryRows rows = RowsOf<T>(k);
  RowTerms terms = {0.0f, 0.0f, 0.0f};
  if (row >= rows.count) return terms;
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
    if (HasSoftCap<T>(k)) {
      const RowTerms terms = TermsOf<T>(k, segment, rotated, page, row);
      for (int a = 0; a < 2; ++a) {
        const float logit = fmaf(score[a][i], terms.factor, terms.offset);
        score[a][i] = (SoftCap(logit, k.p.soft_cap) - terms.shift) * kLog2E;
      }
    }
    const RowSpan span = SpanOf<T>(k, total, rows.TokenOf(min(row, rows.count - 1)));
    for (int a = 0; a < 2; ++a) {
      const int position = sink + page * T::kTokens + 16 * u + 8 * a + lane / 4;
      if (position < span.first) score[a][i] = -INFINITY;
    }
  }
}

// The biases that are added to the logits of a warp's pages: the offset of the page's position
// block minus the shift. With a soft cap there are none (RowTerms). The offset of the next position
// block is prefetched while the current one is attended. Lane i handles row i.
template <class T>
class RowBiases {
 public:
  // REQUIRES: the warp attends every stride-th page from `page` on.
  __device__ __forceinline__ RowBiases(const DecodeKernelParams& k, const Segment& segment,
                                       int page, int stride, int lane)
      : segment_(segment), stride_(stride), lane_(lane) {
    if (!Exist(k)) return;
    const QueryRows rows = RowsOf<T>(k);
    const int row = min(lane, rows.count - 1);
    if (k.p.shift != nullptr) shift_ = k.p.shift[segment.head * rows.heads + rows.HeadOf(row)];
    Load(k, page);
  }

  // Sets the biases of the lane's rows (log2 units) for the warp's pages from `page` on and returns
  // the first page that they do not apply to. REQUIRES: `page` is the constructor's, or the warp's
  // first one not before the previously returned page.
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
    return (k.p.offset != nullptr || k.p.shift != nullptr) && !HasSoftCap<T>(k);
  }

  __device__ __forceinline__ void Load(const DecodeKernelParams& k, int page) {
    if (k.p.offset == nullptr) return;
    const QueryRows rows = RowsOf<T>(k);
    const int block = min(page / k.p.pages_per_position_block, k.p.position_blocks - 1);
    const int64_t at =
        rows.IndexOf(k, segment_.sequence, segment_.head, min(lane_, rows.count - 1));
    offset_ = k.p.offset[at * k.p.position_blocks + block];
  }

  const Segment& segment_;
  const int stride_;
  const int lane_;
  float offset_ = 0.0f;  // offset of the next position block
  float shift_ = 0.0f;
};

}  // namespace crumb::kernels::cuda
