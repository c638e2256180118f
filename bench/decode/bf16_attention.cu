// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode/bf16_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"
#include "models/cuda/launch.cuh"

// The schedule:
// 1. The tokens of all pairs of (sequence, KV head) form one line, which is cut into pieces of
//    equal length, one per block, with one block per multiprocessor.
// 2. The warps of a block take tiles of 16 tokens in turn, each through a ring in shared memory.
//    In the mma.sync of scores, tokens are rows and query rows are columns; in that of values,
//    channels are rows.
// 3. At the end of a pair's part, the block combines the partial results of its warps.
// 4. A second kernel merges the parts of pairs that are cut.
namespace crumb::bench {
namespace {

namespace ptx = kernels::cuda::ptx;

constexpr int kDim = 128;
constexpr int kTile = 16;  // tokens of a tile
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSlots = 3;
constexpr int kRowBytes = 2 * kDim;
constexpr int kSlotBytes = 2 * kTile * kRowBytes;  // K rows, then V rows
constexpr int kSharedBytes = kWarps * kSlots * kSlotBytes;
constexpr int kQueryRowsMax = 16;
constexpr int kBlocksMax = 256;
constexpr int kMergers = 4;

__device__ __forceinline__ void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  ptx::WaitForPrevious();
#endif
}

// A part of a pair: for each query head kDim sums, the running max and the sum of weights.
constexpr int kPartFloats = kQueryRowsMax * (kDim + 2);
static_assert(kPartFloats * 4 <= kSlots * kSlotBytes, "a warp's part fits into its ring");

struct Line {
  int tiles;  // tiles of a pair
  int pairs;
  int blocks;

  __device__ int64_t total() const { return static_cast<int64_t>(tiles) * pairs; }
  __device__ int64_t Cut(int block) const { return total() * block / blocks; }
  // Returns the block whose piece contains `tile`.
  __device__ int BlockOf(int64_t tile) const {
    int block = static_cast<int>(tile * blocks / total());
    while (Cut(block + 1) <= tile) ++block;
    while (Cut(block) > tile) --block;
    return block;
  }
};

struct KernelParams {
  Bf16AttentionParams p;
  Line line;
  int group;     // query heads per KV head
  float scale;   // factor of logits in base 2
  float* parts;  // [blocks + pairs] of kPartFloats; the parts of a pair are consecutive
};

// Returns the index of the part of `block` for `pair`: every block and every pair begins a new
// part.
__device__ __forceinline__ float* PartOf(const KernelParams& k, int block, int pair) {
  return k.parts + static_cast<size_t>(block + pair) * kPartFloats;
}

template <int kTiles>  // tiles of 8 query heads
struct State {
  float o[8][kTiles][4] = {};  // channels 16 m + lane / 4 (+ 8), heads 2 (lane % 4) + {0, 1}
  float maximum[kTiles][2];
  float sum[kTiles][2] = {};
};

__device__ __forceinline__ void AskFor(uint32_t slot, const char* k_rows, int64_t v_offset,
                                       int first, int tokens, int lane) {
#pragma unroll
  for (int i = 0; i < kSlotBytes / 512; ++i) {
    const int piece = i * 32 + lane, row = piece / 16 % kTile, chunk = piece % 16;
    const bool is_v = i >= kSlotBytes / 1024;
    const int token = min(first + row, tokens - 1);
    const char* from = k_rows + (is_v ? v_offset : 0) + static_cast<int64_t>(token) * kRowBytes;
    ptx::CopyAsync16(
        slot + (is_v ? kTile * kRowBytes : 0) + row * kRowBytes + ((chunk ^ (row & 7)) * 16),
        from + chunk * 16);
  }
}

template <int kTiles>
__device__ __forceinline__ void Attend(uint32_t slot, const uint32_t (&q)[kTiles][8][2], int valid,
                                       float scale, int lane, State<kTiles>* state) {
  float s[kTiles][4] = {};
  const int matrix = lane / 8, matrix_row = lane % 8;
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t a[4];
    const int row = matrix_row + (matrix & 1) * 8, chunk = step * 2 + matrix / 2;
    ptx::LoadMatrices(a, slot + row * kRowBytes + ((chunk ^ (row & 7)) * 16));
#pragma unroll
    for (int t = 0; t < kTiles; ++t) ptx::MmaBf16(s[t], a, q[t][step][0], q[t][step][1]);
  }
  uint32_t b[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    float grown[2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s[t][j] = lane / 4 + j / 2 * 8 < valid ? s[t][j] * scale : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float m = fmaxf(s[t][j], s[t][2 + j]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
      grown[j] = fmaxf(state->maximum[t][j], m);
    }
    const bool grows = grown[0] > state->maximum[t][0] || grown[1] > state->maximum[t][1];
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float factor = ptx::Exp2(state->maximum[t][j] - grown[j]);
        state->maximum[t][j] = grown[j];
        state->sum[t][j] *= factor;
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          state->o[m][t][j] *= factor;
          state->o[m][t][2 + j] *= factor;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s[t][j] = ptx::Exp2(s[t][j] - state->maximum[t][j % 2]);
      state->sum[t][j % 2] += s[t][j];
    }
    b[t][0] = ptx::TransposeMatrix(ptx::PackBf16(s[t][0], s[t][1]));
    b[t][1] = ptx::TransposeMatrix(ptx::PackBf16(s[t][2], s[t][3]));
  }
  slot += kTile * kRowBytes;
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    uint32_t a[4];
    const int row = matrix_row + matrix / 2 * 8, chunk = m * 2 + (matrix & 1);
    ptx::LoadMatricesTransposed(a, slot + row * kRowBytes + ((chunk ^ (row & 7)) * 16));
#pragma unroll
    for (int t = 0; t < kTiles; ++t) ptx::MmaBf16(state->o[m][t], a, b[t][0], b[t][1]);
  }
}

// Stores the warp's partial result in its ring.
template <int kTiles>
__device__ __forceinline__ void StorePart(float* part, int lane, const State<kTiles>& state) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int query_row = t * 8 + lane % 4 * 2 + j;
      float sum = state.sum[t][j];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      float* row = part + query_row * (kDim + 2);
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        row[m * 16 + lane / 4] = state.o[m][t][j];
        row[m * 16 + lane / 4 + 8] = state.o[m][t][2 + j];
      }
      if (lane < 4) {
        row[kDim] = state.maximum[t][j];
        row[kDim + 1] = sum;
      }
    }
  }
}

// Combines one channel of one query head over parts that are `stride` floats apart. Returns the
// weighted sum, and sets *maximum and *sum to the running max and the sum of weights.
__device__ __forceinline__ float Merge(const float* part, size_t stride, int query_row, int channel,
                                       float* maximum, float* sum) {
  float m = -INFINITY, total = 0.0f, o = 0.0f;
  const float* row = part + query_row * (kDim + 2);
  for (int i = 0; i < kWarps; ++i) m = fmaxf(m, row[i * stride + kDim]);
  for (int i = 0; i < kWarps; ++i) {
    if (row[i * stride + kDim] == -INFINITY) continue;  // the warp had no tile
    const float factor = ptx::Exp2(row[i * stride + kDim] - m);
    total += factor * row[i * stride + kDim + 1];
    o += factor * row[i * stride + channel];
  }
  *maximum = m;
  *sum = total;
  return o;
}

__device__ void WriteOut(const KernelParams& k, const float* part, size_t stride, int pair) {
  const int sequence = pair / k.p.kv_heads, head = pair % k.p.kv_heads;
  __nv_bfloat16* out = reinterpret_cast<__nv_bfloat16*>(k.p.out) +
                       (static_cast<size_t>(sequence) * k.p.q_heads + head * k.group) * kDim;
  for (int i = threadIdx.x; i < k.group * kDim; i += kThreads) {
    float maximum, sum;
    const float o = Merge(part, stride, i / kDim, i % kDim, &maximum, &sum);
    out[i] = __float2bfloat16(o / sum);
  }
}

// Combines the partial results of the block's warps in shared memory. Writes the output if the
// block has the whole pair, otherwise its part.
__device__ void FinishPart(const KernelParams& k, const float* warps, size_t stride, int pair) {
  const int64_t begin = static_cast<int64_t>(pair) * k.line.tiles;
  if (k.line.BlockOf(begin) == k.line.BlockOf(begin + k.line.tiles - 1)) {
    WriteOut(k, warps, stride, pair);
    return;
  }
  float* part = PartOf(k, blockIdx.x, pair);
  for (int i = threadIdx.x; i < k.group * kDim; i += kThreads) {
    const int query_row = i / kDim, channel = i % kDim;
    float maximum, sum;
    part[query_row * (kDim + 2) + channel] =
        Merge(warps, stride, query_row, channel, &maximum, &sum);
    if (channel == 0) {
      part[query_row * (kDim + 2) + kDim] = maximum;
      part[query_row * (kDim + 2) + kDim + 1] = sum;
    }
  }
}

// Merges one query head of one pair from its parts; four threads compute a channel.
__global__ void __launch_bounds__(kDim* kMergers) CombineKernel(const KernelParams k) {
  models::cuda::WaitForPrevious();
  const int pair = blockIdx.x, query_row = blockIdx.y;
  const int64_t begin = static_cast<int64_t>(pair) * k.line.tiles;
  const int first = k.line.BlockOf(begin);
  const int parts = k.line.BlockOf(begin + k.line.tiles - 1) - first + 1;
  if (parts == 1) return;
  const float* rows = PartOf(k, first, pair) + query_row * (kDim + 2);
  __shared__ float factors[kBlocksMax], maxima[kBlocksMax];
  for (int i = threadIdx.x; i < parts; i += blockDim.x) {
    maxima[i] = rows[static_cast<size_t>(i) * kPartFloats + kDim];
  }
  __syncthreads();
  float maximum = -INFINITY;
  for (int i = threadIdx.x % 32; i < parts; i += 32) maximum = fmaxf(maximum, maxima[i]);
  for (int step = 16; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
  }
  for (int i = threadIdx.x; i < parts; i += blockDim.x) {
    factors[i] = ptx::Exp2(maxima[i] - maximum);
    maxima[i] = factors[i] * rows[static_cast<size_t>(i) * kPartFloats + kDim + 1];
  }
  __syncthreads();
  const int channel = threadIdx.x % kDim, merger = threadIdx.x / kDim;
  float o = 0.0f, sum = 0.0f;
#pragma unroll 8
  for (int i = merger; i < parts; i += kMergers) {
    o = fmaf(factors[i], rows[static_cast<size_t>(i) * kPartFloats + channel], o);
    sum += maxima[i];
  }
  __shared__ float merged[kMergers][kDim], sums[kMergers];
  merged[merger][channel] = o;
  if (channel == 0) sums[merger] = sum;
  __syncthreads();
  if (merger != 0) return;
  for (int i = 1; i < kMergers; ++i) {
    o += merged[i][channel];
    sum += sums[i];
  }
  const int sequence = pair / k.p.kv_heads, head = pair % k.p.kv_heads;
  const size_t row = static_cast<size_t>(sequence) * k.p.q_heads + head * k.group + query_row;
  reinterpret_cast<__nv_bfloat16*>(k.p.out)[row * kDim + channel] = __float2bfloat16(o / sum);
}

template <int kTiles>
__device__ __forceinline__ void LoadQuery(const KernelParams& k, int pair, int lane,
                                          uint32_t (&q)[kTiles][8][2]) {
  const int sequence = pair / k.p.kv_heads, head = pair % k.p.kv_heads;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int query_row = t * 8 + lane / 4;
    const kernels::Bf16* row =
        k.p.q + (static_cast<size_t>(sequence) * k.p.q_heads + head * k.group + query_row) * kDim +
        lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        q[t][step][j] =
            query_row < k.group ? *reinterpret_cast<const uint32_t*>(row + step * 16 + j * 8) : 0u;
      }
    }
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 1) AttendKernel(const KernelParams k) {
#if __CUDA_ARCH__ >= 900
  ptx::LaunchDependents();
#endif
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  char* ring = shared + warp * kSlots * kSlotBytes;
  const uint32_t ring_address = ptx::SharedAddress(ring);
  int64_t at = k.line.Cut(blockIdx.x);
  const int64_t end = k.line.Cut(blockIdx.x + 1);
  bool waits = true;
  while (at < end) {
    const int pair = static_cast<int>(at / k.line.tiles);
    const int first = static_cast<int>(at % k.line.tiles);
    const int count = static_cast<int>(min(end - at, static_cast<int64_t>(k.line.tiles - first)));
    const char* k_rows = reinterpret_cast<const char*>(k.p.rows.address[pair / k.p.kv_heads]) +
                         k.p.rows.layer_offset + pair % k.p.kv_heads * k.p.rows.head_stride;
    const int mine = (count - warp + kWarps - 1) / kWarps;
    const auto ask = [&](int i) {
      if (i < mine) {
        AskFor(ring_address + i % kSlots * kSlotBytes, k_rows, k.p.rows.v_offset,
               (first + warp + i * kWarps) * kTile, k.p.tokens, lane);
      }
      ptx::CommitCopies();
    };
    // The previous kernel writes q and the newest row of each pair.
    if (waits && first + (kSlots - 1) * kWarps >= k.line.tiles) {
      WaitForPrevious();
      waits = false;
    }
    for (int i = 0; i < kSlots - 1; ++i) ask(i);
    if (waits) WaitForPrevious();
    waits = false;
    uint32_t q[kTiles][8][2];
    LoadQuery<kTiles>(k, pair, lane, q);
    State<kTiles> state;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) state.maximum[t][0] = state.maximum[t][1] = -INFINITY;
    for (int i = 0; i < mine; ++i) {
      ptx::WaitCopies<kSlots - 2>();
      __syncwarp();
      ask(i + kSlots - 1);
      const int valid = k.p.tokens - (first + warp + i * kWarps) * kTile;
      Attend<kTiles>(ring_address + i % kSlots * kSlotBytes, q, valid, k.scale, lane, &state);
    }
    ptx::WaitCopies<0>();
    __syncwarp();
    StorePart<kTiles>(reinterpret_cast<float*>(ring), lane, state);
    __syncthreads();
    FinishPart(k, reinterpret_cast<const float*>(shared), kSlots * kSlotBytes / sizeof(float),
               pair);
    __syncthreads();
    at += count;
  }
}

int Processors() {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  return processors < kBlocksMax ? processors : kBlocksMax;
}

size_t PartBytes(int pairs) {
  return static_cast<size_t>(kBlocksMax + pairs) * kPartFloats * sizeof(float);
}

template <int kTiles>
cudaError_t Enqueue(const KernelParams& k, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      AttendKernel<kTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const cudaError_t launched = models::cuda::LaunchWithShared(
      AttendKernel<kTiles>, dim3(k.line.blocks), kThreads, kSharedBytes, stream, k);
  if (launched != cudaSuccess) return launched;
  const dim3 query_rows(k.line.pairs, k.group);
  return models::cuda::Launch(CombineKernel, query_rows, kDim * kMergers, stream, k);
}

}  // namespace

size_t Bf16AttentionWorkspaceBytes(int batch, int kv_heads) {
  const int pairs = batch * kv_heads;
  return PartBytes(pairs);
}

cudaError_t Bf16Attention(const Bf16AttentionParams& p, cudaStream_t stream) {
  if (p.batch < 1 || p.tokens < 1 || p.kv_heads < 1 || p.head_dim != kDim ||
      p.q_heads % p.kv_heads != 0 || p.q_heads / p.kv_heads > kQueryRowsMax ||
      p.rows.token_stride != kRowBytes) {
    return cudaErrorInvalidValue;
  }
  KernelParams k;
  k.p = p;
  k.group = p.q_heads / p.kv_heads;
  k.scale = static_cast<float>(std::log2(std::exp(1.0)) / std::sqrt(double{kDim}));
  const int pairs = p.batch * p.kv_heads;
  const int tiles = (p.tokens + kTile - 1) / kTile;
  // Every block has a tile, so that the parts of a pair belong to consecutive blocks.
  k.line = {tiles, pairs,
            static_cast<int>(std::min<int64_t>(Processors(), int64_t{tiles} * pairs))};
  k.parts = static_cast<float*>(p.workspace);
  return k.group > 8 ? Enqueue<2>(k, stream) : Enqueue<1>(k, stream);
}

}  // namespace crumb::bench
