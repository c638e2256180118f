// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/crc32c.cuh"
#include "kernels/cuda/evict.h"
#include "kernels/cuda/feedback_rows.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/quantize_rows.cuh"
#include "kernels/cuda/rotate_rows.cuh"

// A matrix is the R of one (layer, KV head, K or V). A block keeps one matrix in shared memory and
// passes the windows of its share through it, four warps a window, 16 rows a warp: the product on
// the tensor cores, everything else in its accumulators. docs/kernels/evict.md has the account.
namespace crumb::kernels::cuda {

inline constexpr int kWindowTokens = 64;
inline constexpr int kWarpRows = 16;  // one 16-token group of the tile
inline constexpr int kTeamWarps = kWindowTokens / kWarpRows;
inline constexpr int kTeamThreads = 32 * kTeamWarps;
inline constexpr int kTeamsMax = 4;

// x^(8 n) of the n bytes that lie behind a piece of the tile, for its sum.
struct TilePowers {
  uint32_t codes[2][kTeamWarps][2];  // [K or V][token group][unit of 512 bytes]
  uint32_t meta[2][4];               // [K or V][unit]
  uint32_t zeros;                    // the sum of a tile of zeros
};

struct EvictKernelParams {
  EvictParams p;
  ClipGuess clip[2];  // K, V
  TilePowers powers;
  bool bulk;      // copy R by bulk copies, and multiply by four warps where the device can
  bool streamed;  // R does not fit and passes part by part
};

template <class T, bool kFeedback>
struct EvictLayout {
  // Teams of a block: accumulators of 128 and more registers leave room for few.
  static constexpr int kTeams = kFeedback ? (T::kDim == 256 ? 1 : 3) : (T::kDim == 256 ? 2 : 4);
  static constexpr int kThreads = kTeams * kTeamThreads;
  static constexpr int kRotationBytes = T::kDim * T::kDim * 4;
  static constexpr int kFeedbackBytes =
      kFeedback ? static_cast<int>(EvictFeedbackBytes(T::kDim)) : 0;
  static constexpr int kSyncBytes = 256;  // a barrier, and the teams' sums
  static constexpr int kRowBytes = kWarpRows * T::kDim * 2;
  // With room for two the next matrix is on its way while this one is in use.
  static constexpr int kRotations = kFeedback || T::kDim == 256 ? 1 : 2;
  // Rows, candidates and feedback's scratch take turns in the same place.
  static constexpr int kWarpBytes =
      kFeedback ? (static_cast<int>(sizeof(FeedbackScratch<T>)) + 127) / 128 * 128 : kRowBytes;
  static_assert(kRowBytes == kCandidateBytes<T> && kRowBytes <= kWarpBytes);

  static constexpr int Bytes(bool streamed, int teams) {
    return (streamed ? kPartBytes<T::kDim> : kRotations * kRotationBytes) + kFeedbackBytes +
           kSyncBytes + teams * kTeamWarps * kWarpBytes;
  }
};

// kTeamProducts: four warps multiply together, where the device can; R is whole in shared memory.
template <class T, bool kFeedback, bool kTeamProducts>
class WindowEvictor {
 public:
  using Layout = EvictLayout<T, kFeedback>;

  __device__ __forceinline__ WindowEvictor(const EvictKernelParams& k, char* shared)
      : k_(k),
        p_(k.p),
        shared_(shared),
        rotation_(shared),
        feedback_(shared +
                  (Streamed() ? kPartBytes<T::kDim> : Layout::kRotations * Layout::kRotationBytes)),
        sync_(feedback_ + Layout::kFeedbackBytes),
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0)),
        rows_(sync_ + Layout::kSyncBytes + warp_ * Layout::kWarpBytes),
        team_(warp_ / kTeamWarps),
        group_(warp_ % kTeamWarps) {}

  __device__ __forceinline__ void Run() {
    const int matrices = 2 * p_.layers * p_.kv_heads;
    // Does not depend on the number of windows: constants are on their way before it is known.
    SetMatrix(static_cast<int>(static_cast<int64_t>(matrices) * blockIdx.x / gridDim.x));
    InitBarrier();
    LoadConstants();
#if __CUDA_ARCH__ >= 900
    if (p_.overlap_previous) {
      ptx::LaunchDependents();
      ptx::WaitForPrevious();
    }
#endif
    const int windows = max(0, min(*p_.windows, p_.windows_max));
    const int64_t all = static_cast<int64_t>(matrices) * windows;
    const int64_t begin = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
    for (int64_t at = begin; at < end;) {
      const int matrix = static_cast<int>(at / windows);
      const int first = static_cast<int>(at % windows);
      const int last = static_cast<int>(min(static_cast<int64_t>(windows), first + end - at));
      if (matrix != matrix_) {
        __syncthreads();
        SetMatrix(matrix);
        if (waiting_) {
          rotation_ = OtherRotation();
        } else {
          LoadConstants();
        }
      }
      EvictRange(first, last, at + last - first < end);
      at += last - first;
    }
    WaitConstants();  // no copy may be on its way when the block ends
  }

 private:
  __device__ __forceinline__ void SetMatrix(int matrix) {
    matrix_ = matrix;
    value_ = matrix % 2 == 1;
    head_ = matrix / 2 % p_.kv_heads;
    layer_ = matrix / 2 / p_.kv_heads;
    transform_ = value_ ? &p_.v : &p_.k;
    if (p_.sums == nullptr) return;
#pragma unroll
    for (int i = 0; i < kCodeUnits; ++i) {
      code_factor_[i] = crc::LaneFactor(k_.powers.codes[value_][group_][i]);
    }
#pragma unroll
    for (int i = 0; i < kMetaUnits; ++i) {
      meta_factor_[i] = crc::LaneFactor(k_.powers.meta[value_][i]);
    }
  }

  // --- Constants -----------------------------------------------------------------------------

  __device__ __forceinline__ const char* Rotation(int matrix) const {
    const EvictRotation* rotations = (matrix % 2 == 1 ? p_.v : p_.k).rotation;
    return rotations == nullptr ? nullptr
                                : reinterpret_cast<const char*>(rotations) +
                                      static_cast<int64_t>(matrix / 2) * Layout::kRotationBytes;
  }
  __device__ __forceinline__ char* OtherRotation() const {
    return rotation_ == shared_ ? shared_ + Layout::kRotationBytes : shared_;
  }
  __device__ __forceinline__ bool HasRotation() const { return transform_->rotation != nullptr; }
  __device__ __forceinline__ bool Streamed() const { return !kTeamProducts && k_.streamed; }
  __device__ __forceinline__ bool HasFeedback() const {
    return kFeedback && transform_->feedback != nullptr;
  }

  __device__ __forceinline__ void InitBarrier() {
#if __CUDA_ARCH__ >= 900
    if (!k_.bulk) return;
    if (threadIdx.x == 0) {
      ptx::InitBarrier(ptx::SharedAddress(sync_), 1);
      ptx::FenceBarrierInit();
    }
    __syncthreads();
#endif
  }

  // Starts to copy `bytes` to shared memory; all threads call. Part of what WaitConstants waits
  // for.
  __device__ __forceinline__ void Copy(char* to, const char* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    if (k_.bulk) {
      if (threadIdx.x == 0) {
        ptx::CopyBulkShared(ptx::SharedAddress(to), reinterpret_cast<uint64_t>(from), bytes,
                            ptx::SharedAddress(sync_));
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
    if (k_.bulk && threadIdx.x == 0) {
      ptx::FenceCopyEngine();
      ptx::ArriveExpecting(ptx::SharedAddress(sync_), bytes);
    }
#endif
  }

  __device__ __forceinline__ void LoadConstants() {
    const bool whole = HasRotation() && !Streamed();
    waiting_ = whole || HasFeedback();
    if constexpr (kFeedback) {
      if (!HasFeedback()) {
        for (int i = threadIdx.x; i < Layout::kFeedbackBytes / 4; i += blockDim.x) {
          reinterpret_cast<uint32_t*>(feedback_)[i] = 0;
        }
        __syncthreads();
      }
    }
    if (!waiting_) return;
    Expect((whole ? Layout::kRotationBytes : 0) + (HasFeedback() ? Layout::kFeedbackBytes : 0));
    if (whole) Copy(rotation_, Rotation(matrix_), Layout::kRotationBytes);
    if (HasFeedback()) {
      Copy(feedback_,
           reinterpret_cast<const char*>(transform_->feedback) +
               static_cast<int64_t>(matrix_ / 2) * Layout::kFeedbackBytes,
           Layout::kFeedbackBytes);
    }
  }

  // Starts to load the next matrix beside this one. Only bulk copies: waiting for rows would wait
  // for any other.
  __device__ __forceinline__ void LoadAhead() {
    if constexpr (Layout::kRotations == 2) {
      if (Streamed() || !k_.bulk || Rotation(matrix_ + 1) == nullptr) return;
      // Nobody may still wait for the copy before: the barrier tells two in a row apart, not three.
      __syncthreads();
      waiting_ = true;
      Expect(Layout::kRotationBytes);
      Copy(OtherRotation(), Rotation(matrix_ + 1), Layout::kRotationBytes);
    }
  }

  __device__ __forceinline__ void WaitConstants() {
    if (!waiting_) return;
    waiting_ = false;
#if __CUDA_ARCH__ >= 900
    if (k_.bulk) {
      ptx::WaitBarrier(ptx::SharedAddress(sync_), phase_);
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
    constexpr int kRowsAtOnce = 32 / kPieces > 0 ? 32 / kPieces : 1;
    const int lane = threadIdx.x % 32, first = lane / kPieces, piece = lane % kPieces;
    const int capacity = p_.ring_capacity;
    const int64_t stride = p_.ring_token_stride;
    // Slot of the lane's first row; one wrap at most in a window.
    int slot = p_.ring_begin[window] % capacity + kWarpRows * group_ + first;
    if (slot >= capacity) slot -= capacity;
    const char* at = reinterpret_cast<const char*>(
                         p_.ring_address[window] + layer_ * p_.ring_layer_stride +
                         head_ * p_.ring_head_stride + (value_ ? p_.ring_v_offset : 0)) +
                     slot * stride + 16 * piece;
    const uint32_t to = ptx::SharedAddress(rows_) + first * 2 * T::kDim;
#pragma unroll
    for (int row = 0; row < kWarpRows; row += kRowsAtOnce) {
      ptx::CopyAsync16(to + row * 2 * T::kDim + PieceOffset(first + row, piece), at);
      slot += kRowsAtOnce;
      at += kRowsAtOnce * stride;
      if (slot >= capacity) {
        slot -= capacity;
        at -= capacity * stride;
      }
    }
    ptx::CommitCopies();
  }

  // y = x R - mean, from this warp's rows.
  __device__ __forceinline__ void Transform(const RowPairs<T::kDim>& x, int window,
                                            float (&y)[T::kTiles][4]) {
    const float* mean = nullptr;
    if (transform_->mean != nullptr) {
      const int block = p_.position_block != nullptr ? p_.position_block[window] : 0;
      mean = transform_->mean +
             (static_cast<int64_t>(matrix_ / 2) * p_.position_blocks + block) * T::kDim +
             threadIdx.x % 4 * 2;
    }
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
      float2 m = make_float2(0.0f, 0.0f);
      if (mean != nullptr) m = __ldg(reinterpret_cast<const float2*>(mean + 8 * n));
      y[n][0] = y[n][2] = -m.x;
      y[n][1] = y[n][3] = -m.y;
    }
    if (p_.row_type == RowType::kFp16) {
      Rotate<true>(x, y);
    } else {
      Rotate<false>(x, y);
    }
  }

  template <bool kHalf>
  __device__ __forceinline__ void Rotate(const RowPairs<T::kDim>& x, float (&y)[T::kTiles][4]) {
    if (!HasRotation()) {
      SpreadRows<T::kDim, kHalf>(x, y);
      return;
    }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (kTeamProducts) {
      RotateByTeam<T::kDim, kHalf>(x, ptx::SharedAddress(rotation_), y);
      return;
    }
#endif
    const uint32_t rotation = ptx::SharedAddress(rotation_);
    for (int part = 0; part < 2 * T::kDim / kChunkChannels; ++part) {
      if (Streamed()) {
        __syncthreads();
        Expect(kPartBytes<T::kDim>);
        Copy(rotation_, Rotation(matrix_) + part * kPartBytes<T::kDim>, kPartBytes<T::kDim>);
        waiting_ = true;
        WaitConstants();
      }
      RotateByPart<T::kDim, kHalf>(x, part / 2,
                                   rotation + (Streamed() ? 0 : part * kPartBytes<T::kDim>), y);
    }
  }

  // --- Windows -------------------------------------------------------------------------------

  // Windows [first, last) of the matrix; every team takes every kTeams-th. more: the next matrix
  // follows.
  __device__ __forceinline__ void EvictRange(int first, int last, bool more) {
    const int teams = blockDim.x / kTeamThreads;
    if (first + team_ < last) CopyRows(first + team_);
    WaitConstants();
    if (more) LoadAhead();
    for (int round = first; round < last; round += teams) {
      const int window = round + team_;
      const bool here = window < last;
      // Parts of R come for all teams together.
      if (!here && !(Streamed() && HasRotation())) break;
      const int next = window + teams < last ? window + teams : -1;
      if constexpr (kFeedback) {
        EvictWithFeedback(window, next);
      } else {
        Evict(here ? window : first, here, next);
      }
    }
  }

  __device__ __forceinline__ void LoadAndTransform(int window, float (&y)[T::kTiles][4]) {
    RowPairs<T::kDim> x;
    ptx::WaitCopies<0>();
    __syncwarp();
    ReadRows<T::kDim>(ptx::SharedAddress(rows_), x);
    __syncwarp();
    Transform(x, window, y);
  }

  __device__ __forceinline__ void FindClip(float (&y)[T::kTiles][4], RowFacts* facts) {
    LookAtRows<T>(y, facts);
    const ClipGuess& clip = k_.clip[value_];
    if (clip.rank == 0) return;
    FindThresholds<T>(y, clip, reinterpret_cast<float*>(rows_), facts);
    __syncwarp();
  }

  // next: the team's next window, or -1. !here: takes part in copying R only.
  __device__ __forceinline__ void Evict(int window, bool here, int next) {
    float y[T::kTiles][4];
    LoadAndTransform(window, y);
    if (!here) return;
    RowFacts facts;
    FindClip(y, &facts);
    if (next >= 0) CopyRows(next);
    uint32_t words[T::kTiles / 4], meta[T::kGroups][2];
    const uint32_t status = RoundRows<T>(y, facts, !HasRotation(), words, meta);
    Report(window, status);
    Store(window, words, meta);
  }

  __device__ __forceinline__ void EvictWithFeedback(int window, int next) {
    auto& scratch = *reinterpret_cast<FeedbackScratch<T>*>(rows_);
    uint32_t cut = 0;  // rows that go without clip
    float ratio = 1.0f;
    bool finite[2];
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      {
        float y[T::kTiles][4];
        LoadAndTransform(window, y);
        RowFacts facts;
        FindClip(y, &facts);
        finite[0] = facts.finite[0];
        finite[1] = facts.finite[1];
        BeginFeedback<T>(y, facts, cut, scratch);
      }
      ratio = RoundWithFeedback<T>(scratch, feedback_);
      if (pass == 1 || k_.clip[value_].rank == 0) break;
      // A ratio at its limit says that the clip has cut off most of the row. The team multiplies
      // together, so it goes again together.
      cut = __ballot_sync(~0u, ratio >= kInnerProductRatioMax) & 0xffffu;
      if (!ptx::AnyOfThreads(1 + team_, kTeamThreads, cut != 0)) break;
      CopyRows(window);
    }
    uint32_t words[T::kTiles / 4], meta[T::kGroups][2];
    const uint32_t status = EndFeedback<T>(finite, ratio, scratch, words, meta);
    if (next >= 0) CopyRows(next);
    Report(window, status);
    Store(window, words, meta);
  }

  __device__ __forceinline__ void Report(int window, uint32_t status) {
    if (p_.status != nullptr && status != 0) atomicOr(p_.status + window, status);
  }

  // Writes the group's codes and metadata.
  __device__ __forceinline__ void Store(int window, const uint32_t (&words)[T::kTiles / 4],
                                        const uint32_t (&meta)[T::kGroups][2]) {
    constexpr int kCodeBytes = kWindowTokens * T::kDim / 4;
    constexpr int kMetaBytes = kWindowTokens * T::kGroups * 4;
    constexpr int kWide = T::kDim % 128 == 0 ? 4 : 2;  // words of a lane side by side
    const int lane = threadIdx.x % 32;
    char* tile = reinterpret_cast<char*>(p_.tile_address[window] + layer_ * p_.tile_layer_stride +
                                         head_ * p_.tile_head_stride);
    char* codes = tile + (value_ ? kCodeBytes : 0) + 4 * T::kDim * group_;
    uint32_t out[T::kTiles / 4];
#pragma unroll
    for (int i = 0; i < T::kTiles / 4; ++i) {
      // V's words hold tokens along lanes' columns: each 16-bit half of a K word moves as one.
      out[i] = value_ ? ptx::TransposeMatrix(words[i]) : words[i];
    }
#pragma unroll
    for (int i = 0; i < T::kTiles / 4; i += kWide) {
      char* at = codes + 128 * i + 4 * kWide * lane;
      if constexpr (kWide == 4) {
        *reinterpret_cast<uint4*>(at) = make_uint4(out[i], out[i + 1], out[i + 2], out[i + 3]);
      } else {
        *reinterpret_cast<uint2*>(at) = make_uint2(out[i], out[i + 1]);
      }
    }
    if (lane % 4 == 0) {
      char* meta_at = tile + 2 * kCodeBytes + (value_ ? kMetaBytes : 0) +
                      kWindowTokens / 2 * (lane / 4) + 8 * group_;
#pragma unroll
      for (int y = 0; y < T::kGroups; ++y) {
        *reinterpret_cast<uint2*>(meta_at + 4 * kWindowTokens * y) =
            make_uint2(meta[y][0], meta[y][1]);
      }
    }
    if (p_.sums != nullptr) AddToSum(window, out, meta);
  }

  // --- Tile sums -----------------------------------------------------------------------------

  static constexpr int kCodeUnits = T::kDim == 256 ? 2 : 1;
  static constexpr int kMetaUnits = (T::kGroups + 1) / 2;

  // This warp's bytes of the tile, in their place, as a plain sum.
  __device__ __forceinline__ uint32_t PlainSumOf(const uint32_t (&out)[T::kTiles / 4],
                                                 const uint32_t (&meta)[T::kGroups][2]) const {
    const int lane = threadIdx.x % 32;
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kCodeUnits; ++i) {
      uint4 words;
      if constexpr (T::kDim == 64) {
        // 256 bytes, 8 a lane: they fill the unit's upper half.
        const int from = lane % 16 * 2;
        words = make_uint4(__shfl_sync(~0u, out[0], from), __shfl_sync(~0u, out[1], from),
                           __shfl_sync(~0u, out[0], from + 1), __shfl_sync(~0u, out[1], from + 1));
        if (lane < 16) words = make_uint4(0, 0, 0, 0);
      } else {
        words = make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
      }
      sum ^= crc::Multiply(crc::SumOfUnit(words), code_factor_[i]);
    }
    // Of a group's 256 bytes this warp has 8 in every 32.
    const int row = lane % 16 / 2;
    const bool mine = lane % 2 == group_ / 2;
#pragma unroll
    for (int i = 0; i < kMetaUnits; ++i) {
      constexpr bool kWhole = T::kGroups > 1;  // two groups a unit, else only the upper half
      uint32_t word[2];
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        word[a] = __shfl_sync(~0u, meta[kWhole ? 2 * i + 1 : 0][a], 4 * row);
        const uint32_t lower = kWhole ? __shfl_sync(~0u, meta[2 * i][a], 4 * row) : 0u;
        if (lane < 16) word[a] = lower;
        if (!mine) word[a] = 0;
      }
      const bool upper = group_ % 2 == 1;
      sum ^= crc::Multiply(crc::SumOfUnit(make_uint4(upper ? 0 : word[0], upper ? 0 : word[1],
                                                     upper ? word[0] : 0, upper ? word[1] : 0)),
                           meta_factor_[i]);
    }
    return sum;
  }

  // The team's half of the tile meets the other half in the workspace: who comes second writes.
  __device__ __forceinline__ void AddToSum(int window, const uint32_t (&out)[T::kTiles / 4],
                                           const uint32_t (&meta)[T::kGroups][2]) {
    const uint32_t part = PlainSumOf(out, meta);
    turn_ ^= 1;
    uint32_t* parts = reinterpret_cast<uint32_t*>(sync_ + 64) + (2 * team_ + turn_) * kTeamWarps;
    if (threadIdx.x % 32 == 0) parts[group_] = part;
    ptx::SyncThreads(1 + team_, kTeamThreads);
    if (threadIdx.x % kTeamThreads != 0) return;
    const uint32_t half = parts[0] ^ parts[1] ^ parts[2] ^ parts[3];
    const int64_t tile = (static_cast<int64_t>(window) * p_.layers + layer_) * p_.kv_heads + head_;
    auto* slot = static_cast<unsigned long long*>(p_.workspace) + tile;
    const unsigned long long before = atomicExch(slot, 1ull << 32 | half);
    if (before == 0) return;
    p_.sums[tile] = half ^ static_cast<uint32_t>(before) ^ k_.powers.zeros;
    *slot = 0;
  }

  const EvictKernelParams& k_;
  const EvictParams& p_;
  char* const shared_;
  char* rotation_;  // of this matrix
  char* const feedback_;
  char* const sync_;
  const int warp_;    // from one lane: the compiler then knows that warps do not diverge
  char* const rows_;  // of this warp
  const int team_;
  const int group_;  // 16-token group of the window
  const EvictTransform* transform_ = nullptr;
  int matrix_ = 0, layer_ = 0, head_ = 0;
  bool value_ = false;
  bool waiting_ = false;  // for constants
  int phase_ = 0;
  int turn_ = 0;
  uint32_t code_factor_[kCodeUnits], meta_factor_[kMetaUnits];
};

template <class T, bool kFeedback, bool kTeamProducts>
__global__ void __launch_bounds__(EvictLayout<T, kFeedback>::kThreads, 1)
    EvictKernel(const __grid_constant__ EvictKernelParams k) {
  extern __shared__ __align__(1024) char shared[];
  WindowEvictor<T, kFeedback, kTeamProducts>(k, shared).Run();
}

// What a device has.
struct EvictDevice {
  int processors;
  int shared_bytes;  // of a block at most
  bool team_products;
};

template <int dim, int group_size, bool kFeedback>
cudaError_t LaunchEvict(EvictKernelParams k, const EvictDevice& device, cudaStream_t stream) {
  using T = RowTraits<dim, group_size>;
  using Layout = EvictLayout<T, kFeedback>;
  int teams = Layout::kTeams;
  k.streamed = Layout::Bytes(false, 1) > device.shared_bytes;
  if (k.streamed && kFeedback) teams = 1;  // who goes again would leave the others waiting
  while (teams > 0 && Layout::Bytes(k.streamed, teams) > device.shared_bytes) --teams;
  if (teams == 0) return cudaErrorInvalidConfiguration;
  // As many rounds through a matrix's windows, with no team waiting in the last one.
  const int rounds = (k.p.windows_max + teams - 1) / teams;
  teams = (k.p.windows_max + rounds - 1) / rounds;
  const int bytes = Layout::Bytes(k.streamed, teams);
  auto kernel = EvictKernel<T, kFeedback, false>;
  if constexpr (dim <= 128) {
    if (device.team_products && !k.streamed) kernel = EvictKernel<T, kFeedback, true>;
  }
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t items = int64_t{2} * k.p.layers * k.p.kv_heads * k.p.windows_max;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(device.processors, items)));
  config.blockDim = dim3(teams * kTeamThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = k.p.overlap_previous ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, k);
}

using EvictLauncher = cudaError_t (*)(EvictKernelParams, const EvictDevice&, cudaStream_t);

// Per head_dim; null: no such group size.
EvictLauncher EvictDim64(int group_size, bool feedback);
EvictLauncher EvictDim128(int group_size, bool feedback);
EvictLauncher EvictDim256(int group_size, bool feedback);

}  // namespace crumb::kernels::cuda
