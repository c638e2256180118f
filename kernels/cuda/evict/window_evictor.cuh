// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/evict/evict.h"
#include "kernels/cuda/evict/feedback_rows.cuh"
#include "kernels/cuda/evict/kernel_layout.cuh"
#include "kernels/cuda/evict/quantize_rows.cuh"
#include "kernels/cuda/evict/rotate_rows.cuh"

// The schedule of a block of the evict kernel. A matrix is the R of one (layer, KV head, K or V). A
// block keeps one matrix in shared memory and passes the windows of its work range through it, one
// warpgroup per window and 16 rows per warp: the rows are multiplied by R on the tensor cores, and
// everything else happens in the accumulators (docs/kernels/evict.md).
//
// Life of a block: it starts copying the constants of its first matrix before it knows the number
// of windows, then computes its work range. For each matrix of the range it waits for the constants
// (WaitConstants) and evicts its windows in rounds of one window per warpgroup (EvictRange). Within
// a round the rows of the next window are copied, and the result of the previous one is stored,
// beside the multiplication of this one. In the middle of its first window the block waits for the
// previous kernel of the stream (WaitPrevious). A block ends with no copy in flight.
namespace crumb::kernels::cuda {

template <class T, bool kFeedback, RotateMma kMma>
class WindowEvictor {
 public:
  using Layout = EvictLayout<T, kFeedback>;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr bool kUsesWgmma = kMma == RotateMma::kWgmma;
#else
  static constexpr bool kUsesWgmma = false;
#endif

  __device__ __forceinline__ WindowEvictor(const EvictKernelParams& k, char* shared)
      : k_(k),
        p_(k.p),
        shared_(shared),
        // The shuffle makes the warp's index uniform for the compiler, so that warps do not
        // diverge on it.
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0)),
        waited_(!k.p.overlap_previous) {}

  __device__ __forceinline__ void Run() {
    const int matrices = 2 * p_.layers * p_.kv_heads;
    // The first matrix does not depend on the number of windows, so its copy starts before that
    // number is known.
    const int blocks_per_matrix = k_.blocks_per_matrix;
    InitBarrier();
    SetMatrix(blocks_per_matrix > 1
                  ? blockIdx.x / blocks_per_matrix
                  : static_cast<int>(static_cast<int64_t>(matrices) * blockIdx.x / gridDim.x));
    LoadConstants();
    const int windows = max(0, min(*p_.windows, p_.windows_max));
    const Place begin = BeginOf(blockIdx.x, blocks_per_matrix, windows);
    const Place end = BeginOf(blockIdx.x + 1, blocks_per_matrix, windows);
    few_ = begin.matrix == end.matrix && end.window - begin.window <= Warpgroups();
    int first = begin.window;
    for (int matrix = begin.matrix; matrix < end.matrix || first < end.window; ++matrix) {
      if (matrix != matrix_) {
        __syncthreads();
        SetMatrix(matrix);
        LoadConstants();
      }
      EvictRange(first, matrix < end.matrix ? windows : end.window);
      if (matrix == end.matrix) break;
      first = 0;
    }
    WaitPrevious();
    WaitConstants();  // no copy may be in flight when the block ends
  }

 private:
  // A quantized window that is not stored yet: codes in the order of RoundRows, metadata of the
  // lane's own row.
  struct Result {
    int window = -1;  // -1: none
    uint32_t words[T::kTiles / 4];
    uint32_t meta[T::kGroups];
  };

  struct Place {
    int matrix;
    int window;
  };
  // Returns where the work range of `block` begins. Blocks that share a matrix have equal parts of
  // its windows; blocks that process several matrices have equal parts of the rounds of windows of
  // all matrices.
  __device__ __forceinline__ Place BeginOf(int block, int blocks_per_matrix, int windows) const {
    if (blocks_per_matrix > 1) {
      // The end of one matrix is not the begin of the next, which this block has not loaded.
      const int matrix = blockIdx.x / blocks_per_matrix;
      return {matrix, windows * (block - matrix * blocks_per_matrix) / blocks_per_matrix};
    }
    const int step = k_.windows_apart ? 1 : Warpgroups(), rounds = (windows + step - 1) / step;
    if (rounds == 0) return {matrix_, 0};
    const int all = 2 * p_.layers * p_.kv_heads * rounds, blocks = gridDim.x;
    const int round = all / blocks * block + all % blocks * block / blocks;
    return {round / rounds, round % rounds * step};
  }

  // --- Layout of shared memory ---------------------------------------------------------------

  __device__ __forceinline__ int Warpgroups() const { return blockDim.x / kWarpgroupThreads; }
  __device__ __forceinline__ int WarpgroupIndex() const { return warp_ / kWarpgroupWarps; }
  // the warp's 16-token group
  __device__ __forceinline__ int Group() const { return warp_ % kWarpgroupWarps; }
  __device__ __forceinline__ int WarpgroupBarrier() const { return 1 + WarpgroupIndex(); }
  __device__ __forceinline__ bool IsValue() const { return matrix_ % 2 == 1; }

  __device__ __forceinline__ char* Feedback() const {
    return shared_ + (Streamed() ? kPartBytes<T::kDim> : Layout::kRotationBytes);
  }
  __device__ __forceinline__ char* State() const { return Feedback() + Layout::kFeedbackBytes; }
  __device__ __forceinline__ uint32_t CopyBarrier() const { return ptx::SharedAddress(State()); }
  __device__ __forceinline__ volatile MatrixFacts& Facts() const {
    return *reinterpret_cast<volatile MatrixFacts*>(State() + 16);
  }
  // The address of the mean that is in place for this warpgroup.
  __device__ __forceinline__ volatile uint64_t* PlacedMean() const {
    return reinterpret_cast<volatile uint64_t*>(State() + 64) + WarpgroupIndex();
  }
  __device__ __forceinline__ char* Rows() const {  // this warp's rows
    return State() + Layout::kStateBytes + Warpgroups() * kMeanBytes<T::kDim> +
           warp_ * Layout::kRowBytes;
  }
  // This warpgroup's mean. It is not the last array: compute-sanitizer's memcheck assumes that a
  // descriptor's matrix has no gaps and repetitions and would report an access beyond the end.
  __device__ __forceinline__ char* Mean() const {
    return State() + Layout::kStateBytes + WarpgroupIndex() * kMeanBytes<T::kDim>;
  }
  __device__ __forceinline__ MatrixChecksums<T>& Checksums() const {
    return *reinterpret_cast<MatrixChecksums<T>*>(State() + Layout::kStateBytes +
                                                  Warpgroups() * Layout::kWarpgroupBytes);
  }

  // --- The matrix ----------------------------------------------------------------------------

  __device__ __forceinline__ void SetMatrix(int matrix) {
    matrix_ = matrix;
    if (threadIdx.x == 0) {
      const int head = matrix / 2 % p_.kv_heads, layer = matrix / 2 / p_.kv_heads;
      volatile MatrixFacts& facts = Facts();
      facts.ring_offset = layer * p_.ring_layer_stride + head * p_.ring_head_stride +
                          (IsValue() ? p_.ring_v_offset : 0);
      facts.tile_offset = static_cast<int64_t>(p_.tile_base) + layer * p_.tile_layer_stride +
                          head * p_.tile_head_stride;
      const float* mean = Transform().mean;
      facts.mean = mean == nullptr
                       ? nullptr
                       : mean + static_cast<int64_t>(matrix / 2) * p_.position_blocks * T::kDim;
    }
    // An odd address is that of no mean.
    if (threadIdx.x % kWarpgroupThreads == 0) *PlacedMean() = 1;
    if (p_.checksums != nullptr) Checksums().Load(IsValue());
    __syncthreads();
  }

  // --- Constants -----------------------------------------------------------------------------

  __device__ __forceinline__ const char* Rotation(int matrix) const {
    const EvictRotation* rotations = (matrix % 2 == 1 ? p_.v : p_.k).rotation;
    return rotations == nullptr ? nullptr
                                : reinterpret_cast<const char*>(rotations) +
                                      static_cast<int64_t>(matrix / 2) * Layout::kRotationBytes;
  }
  __device__ __forceinline__ const EvictTransform& Transform() const {
    return IsValue() ? p_.v : p_.k;
  }
  __device__ __forceinline__ bool HasRotation() const {
    return kUsesWgmma || (IsValue() ? p_.v.rotation : p_.k.rotation) != nullptr;
  }
  __device__ __forceinline__ bool Streamed() const { return !kUsesWgmma && k_.streamed; }
  __device__ __forceinline__ bool Bulk() const { return kUsesWgmma || k_.bulk; }
  __device__ __forceinline__ bool HasFeedback() const {
    return kFeedback && (IsValue() ? p_.v.feedback : p_.k.feedback) != nullptr;
  }

  __device__ __forceinline__ void InitBarrier() {
#if __CUDA_ARCH__ >= 900
    if (!Bulk()) return;
    if (threadIdx.x == 0) {
      ptx::InitBarrier(CopyBarrier(), 1);
      ptx::FenceBarrierInit();
    }
    __syncthreads();
#endif
  }

  // Starts a copy of `bytes` to shared memory, for which WaitConstants waits. All threads call it.
  __device__ __forceinline__ void Copy(char* to, const char* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    if (Bulk()) {
      if (threadIdx.x == 0) {
        ptx::CopyBulkShared(ptx::SharedAddress(to), reinterpret_cast<uint64_t>(from), bytes,
                            CopyBarrier());
      }
      return;
    }
#endif
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
      ptx::CopyAsync16(ptx::SharedAddress(to) + 16 * i, from + 16 * i);
    }
  }

  __device__ __forceinline__ void Expect(int bytes) {
#if __CUDA_ARCH__ >= 900
    if (Bulk() && threadIdx.x == 0) {
      ptx::FenceCopyEngine();
      ptx::ArriveExpecting(CopyBarrier(), bytes);
    }
#endif
  }

  __device__ __forceinline__ void LoadConstants() {
    const bool whole = HasRotation() && !Streamed();
    waiting_ = whole || HasFeedback();
    if constexpr (kFeedback) {
      if (!HasFeedback()) {
        for (int i = threadIdx.x; i < Layout::kFeedbackBytes / 4; i += blockDim.x) {
          reinterpret_cast<uint32_t*>(Feedback())[i] = 0;
        }
        __syncthreads();
      }
    }
    if (!waiting_) return;
    Expect((whole ? Layout::kRotationBytes : 0) + (HasFeedback() ? Layout::kFeedbackBytes : 0));
    if (whole) Copy(shared_, Rotation(matrix_), Layout::kRotationBytes);
    if (HasFeedback()) {
      Copy(Feedback(),
           reinterpret_cast<const char*>(Transform().feedback) +
               static_cast<int64_t>(matrix_ / 2) * Layout::kFeedbackBytes,
           Layout::kFeedbackBytes);
    }
  }

  __device__ __forceinline__ void WaitConstants() {
    if (!waiting_) return;
    waiting_ = false;
#if __CUDA_ARCH__ >= 900
    if (Bulk()) {
      ptx::WaitBarrier(CopyBarrier(), phase_);
      phase_ ^= 1;
      return;
    }
#endif
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
    __syncthreads();
  }

  // --- Rows ----------------------------------------------------------------------------------

  // Starts copying this warp's rows of a window to shared memory.
  __device__ __forceinline__ void CopyRows(int window) {
    constexpr int kPieces = T::kDim / 8;  // 16-byte pieces of a row
    constexpr int kRowsAtOnce = 32 / kPieces;
    const int lane = threadIdx.x % 32, first = lane / kPieces, piece = lane % kPieces;
    const int capacity = p_.ring_capacity;
    const char* ring =
        reinterpret_cast<const char*>(p_.ring_address[window] + Facts().ring_offset) + 16 * piece;
    int slot = p_.ring_begin[window];
    if (slot >= capacity) slot %= capacity;
    slot += kWarpRows * Group();
    if (slot >= capacity) slot -= capacity;
    const uint32_t to = ptx::SharedAddress(Rows()) + first * kRowPitch<T::kDim> + 16 * piece;
    if (slot + kWarpRows <= capacity) {
      const char* at = ring + (slot + first) * p_.ring_token_stride;
      const int64_t step = kRowsAtOnce * p_.ring_token_stride;
#pragma unroll
      for (int row = 0; row < kWarpRows; row += kRowsAtOnce) {
        ptx::CopyAsync16(to + row * kRowPitch<T::kDim>, at);
        at += step;
      }
    } else {
#pragma unroll 1
      for (int row = 0; row < kWarpRows; row += kRowsAtOnce) {
        int here = slot + first + row;
        if (here >= capacity) here -= capacity;
        ptx::CopyAsync16(to + row * kRowPitch<T::kDim>, ring + here * p_.ring_token_stride);
      }
    }
    ptx::CommitCopies();
  }

  // Waits for the rows and loads them as channel pairs.
  __device__ __forceinline__ void Load(RowPairs<T::kDim>& x) {
    ptx::WaitCopies<0>();
    __syncwarp();
    ReadRows<T::kDim>(ptx::SharedAddress(Rows()), x);
    __syncwarp();
  }

  // Returns the mean [head_dim] of a window, or null.
  __device__ __forceinline__ const float* MeanOf(int window) const {
    const float* mean = Facts().mean;
    if (mean == nullptr || p_.position_block == nullptr) return mean;
    return mean + static_cast<int64_t>(p_.position_block[window]) * T::kDim;
  }

  // Computes y = x R - mean for this warp's rows. Meanwhile starts copying the rows of window
  // `next` (if not negative) and stores the result of the previous window, which is then empty.
  __device__ __forceinline__ void MakeRows(const RowPairs<T::kDim>& x, int window, int next,
                                           Result* before, float (&y)[T::kTiles][4],
                                           RowFacts* facts) {
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) y[n][0] = y[n][1] = y[n][2] = y[n][3] = 0.0f;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kUsesWgmma) {
      StartRotation<T::kDim>(x, ptx::SharedAddress(shared_), ptx::SharedAddress(Mean()), y);
      if (next >= 0) CopyRows(next);
      if (few_ && !kFeedback) WaitPrevious();
      if (before->window >= 0) Store(*before);
      before->window = -1;
      ptx::WaitWgmma();
      FindExtremes<T>(y, facts);
      return;
    }
#endif
    if (next >= 0) CopyRows(next);
    if (before->window >= 0) Store(*before);
    before->window = -1;
    Rotate(x, y);
    const float* mean = MeanOf(window);
    if (mean != nullptr) {
#pragma unroll
      for (int n = 0; n < T::kTiles; ++n) {
        const float2 m = __ldg(reinterpret_cast<const float2*>(mean + 8 * n + threadIdx.x % 4 * 2));
        y[n][0] -= m.x, y[n][2] -= m.x;
        y[n][1] -= m.y, y[n][3] -= m.y;
      }
    }
    FindExtremes<T>(y, facts);
  }

  // Copies the window's mean to where the warpgroup's wgmma reads it, unless it is there already.
  __device__ __forceinline__ void PlaceMean([[maybe_unused]] int window) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kUsesWgmma) {
      const float* mean = MeanOf(window);
      const uint64_t address = reinterpret_cast<uint64_t>(mean);
      if (__all_sync(~0u, *PlacedMean() == address)) return;
      // no warp of the warpgroup still multiplies
      ptx::SyncThreads(WarpgroupBarrier(), kWarpgroupThreads);
      const int column = threadIdx.x % kWarpgroupThreads;
      if (column < T::kDim) {
        reinterpret_cast<uint4*>(Mean())[column] =
            MeanColumn(mean == nullptr ? 0.0f : __ldg(mean + column));
      }
      if (column == 0) *PlacedMean() = address;
      ptx::FenceCopyEngine();
      ptx::SyncThreads(WarpgroupBarrier(), kWarpgroupThreads);
    }
#endif
  }

  __device__ __forceinline__ void Rotate(const RowPairs<T::kDim>& x, float (&y)[T::kTiles][4]) {
    if (!HasRotation()) {
      SpreadRows<T::kDim>(x, y);
      return;
    }
    // With eight groups a row has 16 scales and minima that may round to another half, so y has to
    // be more accurate.
    constexpr int kParts = kFeedback && T::kGroups == 8 ? kRotationParts<T::kDim> : 2;
    const uint32_t rotation = ptx::SharedAddress(shared_);
    for (int i = 0; i < kParts * (T::kDim / kChunkChannels); ++i) {
      const int part = PartInOrder<T::kDim, kParts>(i);
      if (Streamed()) {
        __syncthreads();
        Expect(kPartBytes<T::kDim>);
        Copy(shared_, Rotation(matrix_) + part * kPartBytes<T::kDim>, kPartBytes<T::kDim>);
        waiting_ = true;
        WaitConstants();
      }
      RotateByPart<T::kDim>(x, part / kRotationParts<T::kDim>,
                            rotation + (Streamed() ? 0 : part * kPartBytes<T::kDim>), y);
    }
  }

  // --- Windows -------------------------------------------------------------------------------

  // Waits until the previous kernel has ended and then lets the next kernel begin. The next kernel
  // must not begin earlier: its reads before its own wait may be of data written by the kernel
  // before this one, which must have ended by then. A block waits in the middle of its first
  // window, so that of consecutive calls each hides half of the next.
  __device__ __forceinline__ void WaitPrevious() {
#if __CUDA_ARCH__ >= 900
    if (waited_) return;
    ptx::WaitForPrevious();
    ptx::LaunchDependents();
    waited_ = true;
#endif
  }

  // Evicts windows [first, last) of the matrix; each warpgroup takes every kWarpgroups-th.
  __device__ __forceinline__ void EvictRange(int first, int last) {
    const int warpgroups = Warpgroups();
    if (first + WarpgroupIndex() < last) CopyRows(first + WarpgroupIndex());
    WaitConstants();
    Result result;
    for (int round = first; round < last; round += warpgroups) {
      const int window = round + WarpgroupIndex();
      const bool here = window < last;
      // All warpgroups take part in copying the parts of R.
      if (!here && !(Streamed() && HasRotation())) break;
      const int next = window + warpgroups < last ? window + warpgroups : -1;
      if (round == first || p_.position_block != nullptr) {
        if (here) PlaceMean(window);
      }
      if constexpr (kFeedback) {
        EvictWithFeedback(window, next, &result);
      } else {
        Evict(here ? window : first, here, next, &result);
      }
    }
    if (result.window >= 0) Store(result);
  }

  template <bool kSquares>
  __device__ __forceinline__ void FindClip(const float (&y)[T::kTiles][4], RowFacts* facts) {
    const ClipGuess& clip = k_.clip[IsValue()];
    if (clip.rank == 0) return;
    FindThresholds<T, kSquares>(y, clip, facts);
  }

  // Evicts one window. `next` is the warpgroup's next window or -1. If !here, the warps only help
  // to copy R. `result` holds the warpgroup's previous window on entry and this one on return.
  __device__ __forceinline__ void Evict(int window, bool here, int next, Result* result) {
    float y[T::kTiles][4];
    RowFacts facts;
    {
      RowPairs<T::kDim> x = {};
      if (here) Load(x);
      MakeRows(x, window, next, result, y, &facts);
    }
    if (!here) return;
    FindClip<false>(y, &facts);
    WaitPrevious();
    const uint32_t status = RoundRows<T>(y, facts, !HasRotation(), result->words, result->meta);
    Finish(window, status, result);
  }

  __device__ __forceinline__ void EvictWithFeedback(int window, int next, Result* result) {
    uint32_t status = 0;
    bool cut = false;  // whether the lane's own row is quantized without clip
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      float y[T::kTiles][4];
      RowFacts facts;
      {
        RowPairs<T::kDim> x;
        Load(x);
        MakeRows(x, window, next, result, y, &facts);
      }
      facts.squares = SumSquares<T>(y);
      FindClip<true>(y, &facts);
      WaitPrevious();
      if (cut) facts.threshold = kFeedbackMagnitudeMax;
      facts.threshold = facts.finite ? fminf(facts.threshold, kFeedbackMagnitudeMax) : 0.0f;
      RowRange ranges[T::kGroups];
#pragma unroll
      for (int g = 0; g < T::kGroups; ++g) ranges[g] = FindRange<T>(y, facts, g);
      const float ratio =
          RoundWithFeedback<T>(y, facts, ranges, !HasRotation(), Feedback(), result->words);
      status = 0;
#pragma unroll
      for (int g = 0; g < T::kGroups; ++g) {
        status |= PackMeta(ranges[g], ratio, facts.finite, &result->meta[g]);
      }
      if (pass == 1 || k_.clip[IsValue()].rank == 0) break;
      // A ratio at its limit shows that the clip has cut off most of the row, which is then
      // quantized again without clip. A warpgroup issues wgmma together, so all of its warps repeat
      // the window.
      cut = ratio >= kInnerProductRatioMax;
      if (!ptx::AnyOfThreads(WarpgroupBarrier(), kWarpgroupThreads, cut)) break;
      ptx::WaitCopies<0>();
      __syncwarp();
      CopyRows(window);
    }
    Finish(window, status, result);
  }

  // Completes `result`: status, the order of V's codes, and the checksum (kernel.cuh).
  __device__ __forceinline__ void Finish(int window, uint32_t status, Result* result);
  // Writes the codes and metadata of the warp's token group.
  __device__ __forceinline__ void Store(const Result& result);
  // Adds the warp's contribution to the tile's word of the workspace. The last of the eight
  // contributors writes the checksum.
  __device__ __forceinline__ void AddToChecksum(const Result& result);

  const EvictKernelParams& k_;
  const EvictParams& p_;
  // R or a part of it, feedback, state, then the warpgroups' means and the warps' rows
  char* const shared_;
  const int warp_;
  int matrix_ = 0;
  bool waited_;           // whether the previous kernel has ended
  bool few_ = false;      // whether each warpgroup of the block has at most one window
  bool waiting_ = false;  // whether copies of constants are in flight
  int phase_ = 0;
};

}  // namespace crumb::kernels::cuda
