// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/evict/evict.h"
#include "kernels/cuda/evict/feedback_rows.cuh"
#include "kernels/cuda/evict/quantize_rows.cuh"
#include "kernels/cuda/evict/rotate_rows.cuh"
#include "kernels/cuda/evict/tile_sums.cuh"

// A matrix is the R of one (layer, KV head, K or V). A block keeps one matrix in shared memory and
// passes the windows of its share through it, four warps a window, 16 rows a warp: the product on
// the tensor cores, everything else in its accumulators. docs/kernels/evict.md has the account.
namespace crumb::kernels::cuda {

inline constexpr int kTeamThreads = 32 * kTeamWarps;

struct EvictKernelParams {
  EvictParams p;
  ClipGuess clip[2];   // K, V
  uint32_t zeros_sum;  // of a tile of zeros
  int sharers;         // blocks of each matrix; 1: blocks go from matrix to matrix
  bool windows_apart;  // and a block may begin between a round's windows
  bool bulk;           // copy R by bulk copies, and multiply by four warps where the device can
  bool streamed;       // R does not fit and passes part by part
};

template <class T, bool kFeedback>
struct EvictLayout {
  // Teams of a block: accumulators of 128 and more registers leave room for few.
  static constexpr int kTeams = kFeedback ? (T::kDim == 256 ? 1 : 4) : (T::kDim == 256 ? 2 : 4);
  static constexpr int kThreads = kTeams * kTeamThreads;
  static constexpr int kRotationBytes = static_cast<int>(EvictRotationBytes(T::kDim));
  static constexpr int kFeedbackBytes =
      kFeedback ? static_cast<int>(EvictFeedbackBytes(T::kDim)) : 0;
  static constexpr int kStateBytes = 128;  // a barrier, facts of the matrix, of the teams' means
  static constexpr int kRowBytes = kWarpRows * kRowPitch<T::kDim>;
  static constexpr int kTeamBytes = kTeamWarps * kRowBytes + kMeanBytes<T::kDim>;

  static constexpr int Bytes(bool streamed, int teams, bool sums) {
    return (streamed ? kPartBytes<T::kDim> : kRotationBytes) + kFeedbackBytes + kStateBytes +
           teams * kTeamBytes + (sums ? static_cast<int>(sizeof(MatrixSums<T>)) : 0);
  }
};

// What is known of a block's matrix; in shared memory, for registers are few.
struct MatrixFacts {
  int64_t ring_offset;  // of its rows in a window's ring
  int64_t tile_offset;
  const float* mean;  // [position_blocks, head_dim] or null
};

// How rows meet R. kByTeam: four warps multiply together; R, of K and of V, is whole in shared
// memory. For devices and rows that can.
enum class Products { kByWarp, kByTeam };

template <class T, bool kFeedback, Products kProducts>
class WindowEvictor {
 public:
  using Layout = EvictLayout<T, kFeedback>;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr bool kByTeam = kProducts == Products::kByTeam;
#else
  static constexpr bool kByTeam = false;
#endif

  __device__ __forceinline__ WindowEvictor(const EvictKernelParams& k, char* shared)
      : k_(k),
        p_(k.p),
        shared_(shared),
        // From one lane: the compiler then knows that warps do not diverge.
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0)),
        waited_(!k.p.overlap_previous) {}

  __device__ __forceinline__ void Run() {
    const int matrices = 2 * p_.layers * p_.kv_heads;
    // Does not depend on the number of windows: constants are on their way before it is known.
    const int sharers = k_.sharers;
    InitBarrier();
    SetMatrix(sharers > 1
                  ? blockIdx.x / sharers
                  : static_cast<int>(static_cast<int64_t>(matrices) * blockIdx.x / gridDim.x));
    LoadConstants();
    const int windows = max(0, min(*p_.windows, p_.windows_max));
    const Place begin = BeginOf(blockIdx.x, sharers, windows);
    const Place end = BeginOf(blockIdx.x + 1, sharers, windows);
    few_ = begin.matrix == end.matrix && end.window - begin.window <= Teams();
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
    WaitConstants();  // no copy may be on its way when the block ends
  }

 private:
  // What a window has become: codes as RoundRows has them, metadata of the lane's own row.
  struct Result {
    int window = -1;  // none
    uint32_t words[T::kTiles / 4];
    uint32_t meta[T::kGroups];
  };

  struct Place {
    int matrix;
    int window;
  };
  // Blocks that share a matrix take equal parts of its windows; blocks that have several, equal
  // parts of all matrices' rounds of windows.
  __device__ __forceinline__ Place BeginOf(int block, int sharers, int windows) const {
    if (sharers > 1) {
      // The end of a matrix is not the begin of the next: it was not loaded.
      const int matrix = blockIdx.x / sharers;
      return {matrix, windows * (block - matrix * sharers) / sharers};
    }
    const int step = k_.windows_apart ? 1 : Teams(), rounds = (windows + step - 1) / step;
    if (rounds == 0) return {matrix_, 0};
    const int all = 2 * p_.layers * p_.kv_heads * rounds, blocks = gridDim.x;
    const int round = all / blocks * block + all % blocks * block / blocks;
    return {round / rounds, round % rounds * step};
  }

  // --- Where things lie ----------------------------------------------------------------------

  __device__ __forceinline__ int Teams() const { return blockDim.x / kTeamThreads; }
  __device__ __forceinline__ int Team() const { return warp_ / kTeamWarps; }
  __device__ __forceinline__ int Group() const { return warp_ % kTeamWarps; }  // of 16 tokens
  __device__ __forceinline__ int TeamBarrier() const { return 1 + Team(); }
  __device__ __forceinline__ bool IsValue() const { return matrix_ % 2 == 1; }

  __device__ __forceinline__ char* Feedback() const {
    return shared_ + (Streamed() ? kPartBytes<T::kDim> : Layout::kRotationBytes);
  }
  __device__ __forceinline__ char* State() const { return Feedback() + Layout::kFeedbackBytes; }
  __device__ __forceinline__ uint32_t CopyBarrier() const { return ptx::SharedAddress(State()); }
  __device__ __forceinline__ volatile MatrixFacts& Facts() const {
    return *reinterpret_cast<volatile MatrixFacts*>(State() + 16);
  }
  // Which mean each team has in place.
  __device__ __forceinline__ volatile uint64_t* PlacedMean() const {
    return reinterpret_cast<volatile uint64_t*>(State() + 64) + Team();
  }
  __device__ __forceinline__ char* Rows() const {  // of this warp
    return State() + Layout::kStateBytes + Teams() * kMeanBytes<T::kDim> +
           warp_ * Layout::kRowBytes;
  }
  // Of this team. Not last: memcheck takes a product's matrix for as long as one without gaps and
  // repeats, twice these bytes.
  __device__ __forceinline__ char* Mean() const {
    return State() + Layout::kStateBytes + Team() * kMeanBytes<T::kDim>;
  }
  __device__ __forceinline__ MatrixSums<T>& Sums() const {
    return *reinterpret_cast<MatrixSums<T>*>(State() + Layout::kStateBytes +
                                             Teams() * Layout::kTeamBytes);
  }

  // --- The matrix ----------------------------------------------------------------------------

  __device__ __forceinline__ void SetMatrix(int matrix) {
    matrix_ = matrix;
    if (threadIdx.x == 0) {
      const int head = matrix / 2 % p_.kv_heads, layer = matrix / 2 / p_.kv_heads;
      volatile MatrixFacts& facts = Facts();
      facts.ring_offset = layer * p_.ring_layer_stride + head * p_.ring_head_stride +
                          (IsValue() ? p_.ring_v_offset : 0);
      facts.tile_offset = layer * p_.tile_layer_stride + head * p_.tile_head_stride;
      const float* mean = Transform().mean;
      facts.mean = mean == nullptr
                       ? nullptr
                       : mean + static_cast<int64_t>(matrix / 2) * p_.position_blocks * T::kDim;
    }
    // No mean lies at an odd address.
    if (threadIdx.x % kTeamThreads == 0) *PlacedMean() = 1;
    if (p_.sums != nullptr) Sums().Load(IsValue());
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
    return kByTeam || (IsValue() ? p_.v.rotation : p_.k.rotation) != nullptr;
  }
  __device__ __forceinline__ bool Streamed() const { return !kByTeam && k_.streamed; }
  __device__ __forceinline__ bool Bulk() const { return kByTeam || k_.bulk; }
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

  // Starts to copy `bytes` to shared memory; all threads call. Part of what WaitConstants waits
  // for.
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

  // Starts to copy this warp's rows of a window.
  __device__ __forceinline__ void CopyRows(int window) {
    constexpr int kPieces = T::kDim / 8;  // of a row
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

  // Waits until they are there, as pairs.
  __device__ __forceinline__ void Load(RowPairs<T::kDim>& x) {
    ptx::WaitCopies<0>();
    __syncwarp();
    ReadRows<T::kDim>(ptx::SharedAddress(Rows()), x);
    __syncwarp();
  }

  // [head_dim] or null.
  __device__ __forceinline__ const float* MeanOf(int window) const {
    const float* mean = Facts().mean;
    if (mean == nullptr || p_.position_block == nullptr) return mean;
    return mean + static_cast<int64_t>(p_.position_block[window]) * T::kDim;
  }

  // y = x R - mean, from this warp's rows; then those of window `next` (none if < 0) are on their
  // way. Meanwhile the window before is stored; it becomes none.
  __device__ __forceinline__ void MakeRows(const RowPairs<T::kDim>& x, int window, int next,
                                           Result* before, float (&y)[T::kTiles][4],
                                           RowFacts* facts) {
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) y[n][0] = y[n][1] = y[n][2] = y[n][3] = 0.0f;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kByTeam) {
      StartRotation<T::kDim>(x, ptx::SharedAddress(shared_), ptx::SharedAddress(Mean()), y);
      if (next >= 0) CopyRows(next);
      if (few_ && !kFeedback) WaitPrevious();
      if (before->window >= 0) Store(*before);
      before->window = -1;
      ptx::WaitProducts();
      LookAtRows<T>(y, facts);
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
    LookAtRows<T>(y, facts);
  }

  // Brings the mean to where the team's products take it from, if it is another than before.
  __device__ __forceinline__ void PlaceMean([[maybe_unused]] int window) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kByTeam) {
      const float* mean = MeanOf(window);
      const uint64_t address = reinterpret_cast<uint64_t>(mean);
      if (__all_sync(~0u, *PlacedMean() == address)) return;
      ptx::SyncThreads(TeamBarrier(), kTeamThreads);  // nobody still multiplies
      const int column = threadIdx.x % kTeamThreads;
      if (column < T::kDim) {
        reinterpret_cast<uint4*>(Mean())[column] =
            MeanColumn(mean == nullptr ? 0.0f : __ldg(mean + column));
      }
      if (column == 0) *PlacedMean() = address;
      ptx::FenceCopyEngine();
      ptx::SyncThreads(TeamBarrier(), kTeamThreads);
    }
#endif
  }

  __device__ __forceinline__ void Rotate(const RowPairs<T::kDim>& x, float (&y)[T::kTiles][4]) {
    if (!HasRotation()) {
      SpreadRows<T::kDim>(x, y);
      return;
    }
    // Eight groups have 16 numbers that may round to another half: of them y has to be nearer.
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

  // Until the kernel before has ended; then the next may begin. Only then: what it reads ahead may
  // come from before this one, but not be still on its way. At about the middle of a block's first
  // window, so that of two calls that follow each other each hides half of the other.
  __device__ __forceinline__ void WaitPrevious() {
#if __CUDA_ARCH__ >= 900
    if (waited_) return;
    ptx::WaitForPrevious();
    ptx::LaunchDependents();
    waited_ = true;
#endif
  }

  // Windows [first, last) of the matrix; every team takes every kTeams-th.
  __device__ __forceinline__ void EvictRange(int first, int last) {
    const int teams = Teams();
    if (first + Team() < last) CopyRows(first + Team());
    WaitConstants();
    Result result;
    for (int round = first; round < last; round += teams) {
      const int window = round + Team();
      const bool here = window < last;
      // Parts of R come for all teams together.
      if (!here && !(Streamed() && HasRotation())) break;
      const int next = window + teams < last ? window + teams : -1;
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

  // next: the team's next window, or -1. !here: takes part in copying R only. result: of the team's
  // window before, then of this one.
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
    bool cut = false;  // the lane's own row goes without clip
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
      // A ratio at its limit says that the clip has cut off most of the row. The team multiplies
      // together, so it goes again together.
      cut = ratio >= kInnerProductRatioMax;
      if (!ptx::AnyOfThreads(TeamBarrier(), kTeamThreads, cut)) break;
      ptx::WaitCopies<0>();
      __syncwarp();
      CopyRows(window);
    }
    Finish(window, status, result);
  }

  __device__ __forceinline__ void Finish(int window, uint32_t status, Result* result) {
    result->window = window;
    if (p_.status != nullptr && status != 0) atomicOr(p_.status + window, status);
    if (IsValue()) {
      // V's words hold tokens along lanes' columns: each 16-bit half of a K word moves as one.
#pragma unroll
      for (uint32_t& word : result->words) word = ptx::TransposeMatrix(word);
    }
    if (p_.sums != nullptr) AddToSum(*result);
  }

  // Writes the group's codes and metadata.
  __device__ __forceinline__ void Store(const Result& result) {
    constexpr int kCodeBytes = kWindowTokens * T::kDim / 4;
    constexpr int kMetaBytes = kWindowTokens * T::kGroups * 4;
    constexpr int kWide = T::kDim % 128 == 0 ? 4 : 2;  // words of a lane side by side
    const int lane = threadIdx.x % 32;
    const auto& words = result.words;
    char* tile = reinterpret_cast<char*>(p_.tile_address[result.window] + Facts().tile_offset);
    char* codes = tile + (IsValue() ? kCodeBytes : 0) + 4 * T::kDim * Group() + 4 * kWide * lane;
#pragma unroll
    for (int i = 0; i < T::kTiles / 4; i += kWide) {
      if constexpr (kWide == 4) {
        *reinterpret_cast<uint4*>(codes + 128 * i) =
            make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      } else {
        *reinterpret_cast<uint2*>(codes + 128 * i) = make_uint2(words[i], words[i + 1]);
      }
    }
    if (lane % 4 < 2) {
      char* meta = tile + 2 * kCodeBytes + (IsValue() ? kMetaBytes : 0) +
                   kWindowTokens / 2 * (lane / 4) + 8 * Group() + 4 * (lane % 2);
#pragma unroll
      for (int g = 0; g < T::kGroups; ++g) {
        *reinterpret_cast<uint32_t*>(meta + 4 * kWindowTokens * g) = result.meta[g];
      }
    }
  }

  // The eight parts of a tile meet in its word of the workspace: who comes last writes the sum.
  __device__ __forceinline__ void AddToSum(const Result& result) {
    const uint32_t part = Sums().PartOf(Group(), result.words, result.meta);
    if (threadIdx.x % 32 != 0) return;
    const int64_t tile =
        static_cast<int64_t>(result.window) * p_.layers * p_.kv_heads + matrix_ / 2;
    auto* word = static_cast<unsigned long long*>(p_.workspace) + tile;
    const uint64_t mine = uint64_t{1} << (32 + kTeamWarps * IsValue() + Group()) | part;
    const uint64_t now = atomicXor(word, mine) ^ mine;
    if (now >> 32 != (1u << 2 * kTeamWarps) - 1) return;
    p_.sums[tile] = static_cast<uint32_t>(now) ^ k_.zeros_sum;
    *word = 0;
  }

  const EvictKernelParams& k_;
  const EvictParams& p_;
  char* const shared_;  // R, or a part of it; feedback; state; the warps'; the teams'
  const int warp_;
  int matrix_ = 0;
  bool waited_;           // for the kernel before
  bool few_ = false;      // the block has one window a team
  bool waiting_ = false;  // for constants
  int phase_ = 0;
};

template <class T, bool kFeedback, Products kProducts>
__global__ void __launch_bounds__(EvictLayout<T, kFeedback>::kThreads, 1)
    EvictKernel(const __grid_constant__ EvictKernelParams k) {
  extern __shared__ __align__(1024) char shared[];
  WindowEvictor<T, kFeedback, kProducts>(k, shared).Run();
}

}  // namespace crumb::kernels::cuda
