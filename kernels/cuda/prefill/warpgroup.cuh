// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/decode/decode_ptx.cuh"
#include "kernels/cuda/prefill/query.cuh"
#include "kernels/cuda/prefill/traits.cuh"

// Common definitions of the wgmma path. A block has two consumer warpgroups with 64 query rows
// each, and eight producer warps, four for K and four for V, which serve both consumers: they
// unpack tiles (warpgroup_unpack.cuh) and copy BF16 rows (warpgroup_rows.cuh). Query rows are the
// rows of every MMA, so a row's softmax stays in four lanes.
//
// Buffers pass between producers and consumers by pairs of mbarriers: a producer waits until a
// buffer is free, fills it and arrives on its full barrier; consumers wait for that, read the
// buffer and arrive on its free barrier.
namespace crumb::kernels::cuda::prefill {

// Exponents of probabilities: p reaches 2^kWgmmaHeadroom where the running max is set, which is
// raised when p exceeds 2^kWgmmaHeadroomMax.
inline constexpr float kWgmmaHeadroom = 10.0f;
inline constexpr float kWgmmaHeadroomMax = 15.0f;

// The constants of a token's key: 16 fp16 channels, four for each group. Its constant c = c0 + c1
// in two fp16 parts and the sum s = s0 + s1 of q' over the group multiply as (c0, c0, c1, 0) and
// (s0, s1, s0, 0). Matrices of constants are not swizzled: 8 rows of the first 8 channels, then of
// the others, 16 bytes each.
inline constexpr int kConstantBytes = 32;
// Returns where the channels of group `y` begin.
__device__ constexpr int ConstantsOffset(int y) { return y / 2 * 128 + y % 2 * 8; }
// Returns where the constants of row (token or query row) `row` begin.
__device__ constexpr int ConstantsRow(int row) { return row / 8 * 256 + row % 8 * 16; }

template <class T>
struct WarpgroupTraits {
  static_assert(T::kWarps == 4 && T::kBlockQueryRows == 128 &&
                (T::kExact ? T::kDim == 128 && T::kGroups <= 2 : T::kGroups <= 4));
  static constexpr bool kWide = T::kDim == 256;  // its outputs take most registers
  static constexpr int kConsumers = 2;
  static constexpr int kQueryRows = 64;                            // query rows per warpgroup
  static constexpr int kThreads = (kConsumers + 2) * T::kThreads;  // per block
  static constexpr int kLineBytes = 128;  // bytes of an operand's row: 64 channels or tokens
  static constexpr int kMatrixBytes = kQueryRows * kLineBytes;
  static constexpr int kMatrices = T::kDim / 64;  // matrices of 64 channels in a row
  // A row's channels are accumulated by kParts wgmmas of kPartTiles times 8 channels. R is in
  // shared memory for one part at a time.
  static constexpr int kParts = kWide ? 4 : 1;
  static constexpr int kPartTiles = T::kDim / 8 / kParts;
  static constexpr int kPartChannels = 8 * kPartTiles;
  // Tiles per step. If kExact, two groups per row need an accumulator each, which leaves registers
  // for one tile.
  static constexpr int kStepTiles = kWide || (T::kExact && T::kGroups == 2) ? 1 : 2;
  // Matrices of 64 channels per warpgroup: q' in its parts.
  static constexpr int kOperands = kMatrices * T::kQueryParts;
  static constexpr int kStepTokens = kStepTiles * T::kTokens;
  // Buffers of unpacked keys, and of values.
  static constexpr int kBuffers = kWide ? 2 : 4 / kStepTiles;
  // Steps of stored tiles in shared memory, and how many steps behind its last read a slot is
  // refilled.
  static constexpr int kSlots = kWide ? 2 : T::kExact ? 5 - kStepTiles : T::kGroups == 4 ? 4 : 5;
  static constexpr int kRefillLag = kWide ? 0 : 1;
  // Whether the loop over steps is unrolled over the buffers, which makes their addresses
  // constants. Where registers are short that loses more.
  static constexpr bool kUnrolls = !kWide && !T::kSoftCap;
  // Whether wgmmas with a matrix of ones sum probabilities, instead of additions, which are an
  // eighth of the loop. At head_dim 256 the loop waits for wgmmas, and more of them cost time.
  static constexpr bool kSumsByMma = !T::kExact && !kWide;
  static constexpr int kRows = kWide ? 32 : 64;  // BF16 tokens per stage
  static constexpr int kStages = 4;
  // Registers per thread after they are redistributed; 128 when the kernel starts.
  static constexpr int kProducerRegisters = T::kExact || kWide ? 40 : 56;
  static constexpr int kConsumerRegisters = T::kExact || kWide ? 216 : 200;
};

// Shared memory of one warpgroup. Matrices are [channel / 64] with one line per query row, in the
// 128-byte swizzle.
template <class T>
struct alignas(1024) WarpgroupShared {
  using U = WarpgroupTraits<T>;
  char operands[U::kOperands]
               [U::kMatrixBytes];  // q' in fp16 parts; then the query; then the output
  // Sums of q' over each group, laid out as UnpackedKeys::constants, unless kExact.
  char sums[T::kExact ? 0 : U::kQueryRows][kConstantBytes];
  float bias[U::kStepTiles][U::kQueryRows];  // bias of a step's logits per tile, log2 units
  int token[U::kQueryRows];                  // fresh token of the query row
  int row[U::kQueryRows];                    // index in q and out; negative: no such row
};

// Unpacked keys of a step: [channel / 64] with one line per token, and the keys' constants.
template <class T>
struct UnpackedKeys {
  using U = WarpgroupTraits<T>;
  char codes[U::kMatrices][U::kStepTokens][U::kLineBytes];
  char constants[T::kExact ? 0 : U::kStepTokens][kConstantBytes];
};
// Unpacked values of a step: one line of a tile's tokens per channel.
template <class T>
struct UnpackedValues {
  using U = WarpgroupTraits<T>;
  char values[U::kStepTiles][T::kDim][U::kLineBytes];
};

// The tiles of a step as they are stored.
template <class T>
struct StoredTiles {
  char bytes[WarpgroupTraits<T>::kStepTiles][T::kTileBytes];
};

template <class T>
struct WgmmaShared {
  using U = WarpgroupTraits<T>;
  WarpgroupShared<T> warpgroup[U::kConsumers];
  union {
    struct {
      // [bf16 part][inner channel / 64][column]
      char rotation[2][U::kMatrices][U::kPartChannels][U::kLineBytes];
      // The unrotated query; then low bf16 parts of the output.
      char rows[U::kConsumers][U::kMatrices][U::kMatrixBytes];
    } basis;
    struct {
      UnpackedKeys<T> keys[U::kBuffers];
      UnpackedValues<T> values[U::kBuffers];
      StoredTiles<T> tiles[U::kSlots];
      // If kExact, metadata of two tokens: scales times the factor of scores (x, y), minima (z, w).
      float4 key_meta[T::kExact ? U::kBuffers : 0][T::kGroups][U::kStepTokens / 2];
    };
    // [stage][K, V][channel / 64][token]
    char rows[U::kStages][2][U::kMatrices][U::kRows][U::kLineBytes];
  };
  // Factors of a step's scores: of tokens 16 w to 16 w + 15 of its tiles. Not used if kExact.
  float4 key_factor[U::kBuffers];
  int value_exponent[U::kBuffers];  // values of a step are divided by 2^exponent
  float most[U::kConsumers * T::kWarps];
  alignas(128) uint4 ones[U::kSumsByMma ? 16 : 0];  // in fp16, a matrix B of 8 columns
};

// The mbarriers: full and free barriers of stored tiles, unpacked keys, values and BF16 rows.
template <class T>
struct WgmmaBarriers {
  using U = WarpgroupTraits<T>;
  uint64_t tile[U::kSlots], tile_free[U::kSlots];
  uint64_t keys[U::kBuffers], keys_free[U::kBuffers];
  uint64_t values[U::kBuffers], values_free[U::kBuffers];
  uint64_t rows[U::kStages], rows_free[U::kStages];
};

// A thread's place in its consumer warpgroup, and the warpgroup's query rows.
struct Warpgroup {
  int index, thread, warp, lane;
  int last_token;  // fresh token of the last query row that exists, -1: the warpgroup is idle

  template <class T>
  __device__ __forceinline__ explicit Warpgroup(const Block<T>& block)
      : index(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / T::kThreads, 0)),
        thread(static_cast<int>(threadIdx.x) % T::kThreads),
        warp(thread / 32),
        lane(thread % 32) {
    constexpr int kQueryRows = WarpgroupTraits<T>::kQueryRows;
    const int count = min(block.query_rows - kQueryRows * index, kQueryRows);
    const int64_t last = block.first_query_row + kQueryRows * index + count - 1;
    last_token = count > 0 ? static_cast<int>(last / block.heads) : -1;
  }
  // Waits for the warpgroup.
  __device__ __forceinline__ void Sync() const { ptx::SyncThreads(1 + index, 128); }
  // Consumer warpgroups issue their wgmmas alternately, so that one multiplies while the other
  // computes probabilities. Warpgroup 0 begins.
  template <class T>
  __device__ __forceinline__ void WaitForTensorCores(const Block<T>& block) const {
    if (block.query_rows > WarpgroupTraits<T>::kQueryRows) ptx::SyncThreads(7 + index, 256);
  }
  template <class T>
  __device__ __forceinline__ void PassTensorCores(const Block<T>& block) const {
    if (block.query_rows > WarpgroupTraits<T>::kQueryRows) {
      asm volatile("bar.arrive %0, %1;" ::"r"(8 - index), "r"(256) : "memory");
    }
  }
  // Returns the query row of the lane's accumulator elements [n][2 a + e].
  __device__ __forceinline__ int Query(int a) const { return 16 * warp + lane / 4 + 8 * a; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Running softmax of a warp's 16 query rows. The lane's are rows r and r + 8.
struct RunningSoftmax {
  float sum[2] = {};                // sum of p over this lane's tokens
  float minus_running_max[2] = {};  // the negated running max, log2 units
  bool known = false;               // whether rows have a running max
};

// The fp32 elements of a warp's 16 query rows: part[p][n][2 a + e] is row r + 8 a, channel
// 8 (kPartTiles p + n) + 2 c + e.
template <class T>
struct WgmmaRows {
  using U = WarpgroupTraits<T>;
  float part[U::kParts][U::kPartTiles][4];

  // Returns the elements of channels 8 n to 8 n + 7.
  __device__ __forceinline__ float (&Tile(int n))[4] {
    return part[n / U::kPartTiles][n % U::kPartTiles];
  }
  // Marks them as written here (ptx::TakeWgmmaResults).
  __device__ __forceinline__ void TakeResults() {
#pragma unroll
    for (auto& own : part) ptx::TakeWgmmaResults(own);
  }
  __device__ __forceinline__ void Scale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < T::kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) Tile(n)[i] *= factor[i / 2];
    }
  }
};

template <class T>
struct WgmmaState : RunningSoftmax {
  WgmmaRows<T> out = {};
};

__device__ __forceinline__ uint64_t Matrix(const void* shared) {
  return ptx::SwizzledMatrix(ptx::SharedAddress(shared));
}

// Waits for both consumer warpgroups.
__device__ __forceinline__ void SyncConsumers() { ptx::SyncThreads(3, 256); }

// Signals to the producers that this consumer has finished with the memory that the next tokens are
// copied to. It does not wait.
template <class T>
__device__ __forceinline__ void SignalProducers() {
  constexpr int kThreads = (WarpgroupTraits<T>::kConsumers + 1) * T::kThreads;
  asm volatile("bar.arrive 4, %0; bar.arrive 9, %0;" ::"n"(kThreads) : "memory");
}
// Waits for SignalProducers of both consumers. The producers of K, or of V, call it.
template <class T>
__device__ __forceinline__ void WaitForConsumers(bool value) {
  ptx::SyncThreads(value ? 9 : 4, (WarpgroupTraits<T>::kConsumers + 1) * T::kThreads);
}

// Waits for the use of a buffer that `step` makes; its number is the parity of the barrier.
template <int kBuffers>
__device__ __forceinline__ void WaitStep(const uint64_t (&barriers)[kBuffers], uint32_t step) {
  ptx::WaitBarrier(ptx::SharedAddress(&barriers[step % kBuffers]), step / kBuffers % 2);
}

// Arrives on the barrier of the buffer that `step` uses. Every lane arrives for itself, when it has
// written or read its part.
template <int kBuffers>
__device__ __forceinline__ void ArriveStep(uint64_t (&barriers)[kBuffers], uint32_t step) {
  ptx::Arrive(ptx::SharedAddress(&barriers[step % kBuffers]), 1);
}

// Initialises the mbarriers. REQUIRES: one thread of the block calls it, and the block synchronises
// afterwards.
template <class T>
__device__ __forceinline__ void InitWgmmaBarriers(const Block<T>& block,
                                                  WgmmaBarriers<T>& barriers) {
  using U = WarpgroupTraits<T>;
  const int readers = (block.query_rows > U::kQueryRows ? U::kConsumers : 1) * T::kThreads;
  const auto init = [](uint64_t& barrier, int arrivals) {
    ptx::InitBarrier(ptx::SharedAddress(&barrier), arrivals);
  };
  for (int i = 0; i < U::kSlots; ++i) {
    init(barriers.tile[i], 1);
    init(barriers.tile_free[i], 2 * T::kThreads);
  }
  for (int i = 0; i < U::kBuffers; ++i) {
    init(barriers.keys[i], T::kThreads);
    init(barriers.values[i], T::kThreads);
    init(barriers.keys_free[i], readers);
    init(barriers.values_free[i], readers);
  }
  for (int i = 0; i < U::kStages; ++i) {
    init(barriers.rows[i], 2 * T::kThreads);
    init(barriers.rows_free[i], readers);
  }
  ptx::FenceBarrierInit();
  ptx::FenceCopyEngine();
}

// Returns where a lane stores its rows of a matrix by StoreMatrices: 16-byte pieces `piece` (even)
// and piece + 1. Matrices are rows r and r + 8 of the first piece, then of the second.
template <class T>
__device__ __forceinline__ uint32_t LineAddress(const char* matrix, int piece,
                                                const Warpgroup& warpgroup) {
  return ptx::SharedAddress(matrix) +
         (16 * warpgroup.warp + warpgroup.lane % 16) * WarpgroupTraits<T>::kLineBytes +
         (((piece + warpgroup.lane / 16) ^ (warpgroup.lane % 8)) * 16);
}

// Splits two floats into two fp16 pairs after limiting them to fp16's range.
__device__ __forceinline__ void SplitHalf(float x, float y, uint32_t* high, uint32_t* low) {
  *high = ptx::PackHalf(LimitHalf(x), LimitHalf(y));
  *low = ptx::PackHalf(LimitHalf(x) - ptx::LowHalf(*high), LimitHalf(y) - ptx::HighHalf(*high));
}

// Reduce over the four lanes that share query rows.
__device__ __forceinline__ float SumOverQuad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float MaxOverQuad(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Raises the running max of rows whose logits t[kBegin .. kEnd), relative to it, exceed the limit.
// Rescales older probabilities: multiplies `factor`, the softmax sum and t[0 .. kBegin), which are
// probabilities already, by 2^-change.
template <int kBegin, int kEnd, int kTokenTiles>
__device__ __forceinline__ void RaiseRunningMax(float (&t)[kTokenTiles][4], RunningSoftmax& state,
                                                float (&factor)[2]) {
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    float top = -INFINITY;
#pragma unroll
    for (int n = kBegin; n < kEnd; ++n) top = fmaxf(top, fmaxf(t[n][2 * a], t[n][2 * a + 1]));
    top = MaxOverQuad(top);
    if (state.known) top = fmaxf(top, kWgmmaHeadroom);
    const float moved = top > -INFINITY ? top - kWgmmaHeadroom : 0.0f;
    const float scale = state.known ? ptx::Exp2(-moved) : 1.0f;
    state.minus_running_max[a] -= moved;
    state.sum[a] *= scale;
    factor[a] *= scale;
#pragma unroll
    for (int n = 0; n < kEnd; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = t[n][2 * a + e];
        x = n < kBegin ? x * scale : x - moved;
      }
    }
  }
  state.known = true;
}

// Turns the logits of a step into probabilities, half a step at a time: the exponentials of the
// first half run beside the logits of the second, which `logits` computes. It has
//   Begin(half): called before the logits of a half
//   Compute(n): sets t[n] to logits in log2 units relative to the running max
//   End(half): called after them.
// kSum: adds the probabilities to the softmax sum. If it raises the running max of a row it returns
// true, and the caller multiplies outputs by `factor`.
template <bool kSum, int kTokenTiles, class Logits>
__device__ __forceinline__ bool ComputeProbabilities(float (&t)[kTokenTiles][4], Logits&& logits,
                                                     RunningSoftmax& state, float (&factor)[2]) {
  constexpr int kHalf = kTokenTiles / 2;
  // Compared as integers, positive floats have their order and negative ones are below them.
  int beyond[4] = {};
  const auto compute = [&](int n) {
    logits.Compute(n);
    const int i = n % 2 * 2;  // independent chains
    beyond[i] = __vimax3_s32(beyond[i], __float_as_int(t[n][0]), __float_as_int(t[n][1]));
    beyond[i + 1] = __vimax3_s32(beyond[i + 1], __float_as_int(t[n][2]), __float_as_int(t[n][3]));
  };
  const auto exceeds = [&] {
    const int most = max(max(beyond[0], beyond[1]), max(beyond[2], beyond[3]));
    return __any_sync(~0u, most > __float_as_int(kWgmmaHeadroomMax) || !state.known);
  };
  float sum[2][2] = {};
  const auto exponentiate = [&](int n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) t[n][i] = ptx::Exp2(t[n][i]);
    if constexpr (kSum) {
      sum[n % 2][0] += t[n][0] + t[n][1];
      sum[n % 2][1] += t[n][2] + t[n][3];
    }
  };
  factor[0] = factor[1] = 1.0f;
  bool moved = false;
  logits.Begin(0);
#pragma unroll
  for (int n = 0; n < kHalf; ++n) compute(n);
  logits.End(0);
  if (__builtin_expect(exceeds(), 0)) {
    RaiseRunningMax<0, kHalf>(t, state, factor);
    moved = true;
  }
  beyond[0] = beyond[1] = beyond[2] = beyond[3] = 0;
  logits.Begin(1);
#pragma unroll
  for (int n = 0; n < kHalf; ++n) {
    compute(kHalf + n);
    exponentiate(n);
  }
  logits.End(1);
  if constexpr (kSum) {
    state.sum[0] += sum[0][0] + sum[1][0];
    state.sum[1] += sum[0][1] + sum[1][1];
  }
  if (__builtin_expect(exceeds(), 0)) {
    RaiseRunningMax<kHalf, kTokenTiles>(t, state, factor);
    moved = true;
  }
  sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = 0.0f;
#pragma unroll
  for (int n = kHalf; n < kTokenTiles; ++n) exponentiate(n);
  if constexpr (kSum) {
    state.sum[0] += sum[0][0] + sum[1][0];
    state.sum[1] += sum[0][1] + sum[1][1];
  }
  return moved;
}

#endif

}  // namespace crumb::kernels::cuda::prefill
