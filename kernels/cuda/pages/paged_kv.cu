// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/pages.h"

#include <algorithm>

#include "kernels/cuda/common/device_limits.h"
#include "kernels/cuda/common/page_layout.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/pages/fp8_rows.cuh"

// Dequantize: a block turns the K (or V) halves of one head's tiles into rows, each warp 32
// channels of them. Masked codes are the first operand of the MMA; R' stays in the warps' registers
// as the second (docs/kernels/paged_kv.md).
namespace crumb::kernels::cuda {
namespace {

constexpr int kTokens = 64;
// Tokens per MMA, and tiles in flight per block.
constexpr int kGroupTokens = 16;
constexpr int kStages = 4;

template <int dim, int group_size>
struct Traits {
  static constexpr int kDim = dim;
  static constexpr int kGroups = dim / group_size;
  static constexpr int kWarps = dim / 32;  // each warp computes 32 channels
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSteps = dim / 16;
  static constexpr int kWords = dim / 32;  // code words of a lane per 16 tokens
  // code words of a lane that lie side by side
  static constexpr int kWordsTogether = kWords < 4 ? 2 : 4;
  static constexpr int kCodeBytes = kTokens * dim / 4;
  static constexpr int kMetaBytes = kTokens * kGroups * 4;
  static constexpr int kStepsPerGroup = group_size / 16;
  // Blocks per SM with R' in registers, and without.
  static constexpr int kRotatedBlocks = dim == 256 ? 1 : dim == 128 ? 4 : 8;
  static constexpr int kExpandBlocks = dim == 256 ? 4 : 8;
  static_assert(kCodeBytes == 16 * kThreads, "one piece of 16 bytes a thread");
  static_assert(kMetaBytes <= 16 * kThreads && kTokens <= kThreads);
};

// One tile's K or V half in shared memory, and the places of its rows in the engine's pages.
template <class T>
struct Stage {
  alignas(16) char codes[T::kCodeBytes];
  alignas(16) char meta[T::kMetaBytes];
  int block[kTokens];  // the engine's block, or negative if the token is absent
  int row[kTokens];    // the row within the block
};

template <class T>
struct Shared {
  Stage<T> stages[kStages];
  float column_sum[T::kGroups][T::kDim];  // column sums of R', per group of its rows
};

// The addresses that the copies of a page need. They are loaded one item ahead of the copies.
struct NextPage {
  uint64_t tile;
  int sequence;
  int first_token;
};

// Numbers of blocks that process one head's K and one head's V. If only one of them is rotated it
// gets more blocks.
struct BlockCounts {
  int k, v;
};

// The items (layer, page) of one head's K or V that this block processes.
struct WorkRange {
  int head;
  bool value;
  int pages;
  int64_t begin, end;

  __device__ __forceinline__ WorkRange(const DequantizeParams& p, const BlockCounts& counts)
      : head(blockIdx.x % p.kv_heads), pages(max(0, min(*p.pages, p.pages_max))) {
    // Blocks of K and V alternate as long as both have some left, so that K and V of a token are
    // written at about the same time.
    int slot = blockIdx.x / p.kv_heads;
    const int both = 2 * min(counts.k, counts.v);
    value = slot < both ? slot % 2 == 1 : counts.v > counts.k;
    slot = slot < both ? slot / 2 : slot - both / 2;
    const int64_t all = static_cast<int64_t>(p.layers) * pages;
    const int count = value ? counts.v : counts.k;
    begin = all * slot / count;
    end = all * (slot + 1) / count;
  }
};

__device__ __forceinline__ NextPage LoadPage(const DequantizeParams& p, const WorkRange& work,
                                             int64_t item) {
  NextPage next = {0, 0, 0};
  if (item < work.end) {
    const int page = static_cast<int>(item % work.pages);
    next.tile = p.page_address[page];
    next.sequence = p.tokens.sequence[page];
    next.first_token = p.tokens.first_token[page];
  }
  return next;
}

template <class T>
__device__ __forceinline__ void StartCopies(const DequantizeParams& p, const WorkRange& work,
                                            int64_t item, const NextPage& next, Stage<T>& stage) {
  if (item >= work.end) return;
  const int i = threadIdx.x;
  const int layer = static_cast<int>(item / work.pages);
  const char* tile = reinterpret_cast<const char*>(next.tile + layer * p.tile_layer_stride +
                                                   work.head * p.tile_head_stride);
  ptx::CopyAsync16(ptx::SharedAddress(stage.codes + 16 * i),
                   tile + (work.value ? T::kCodeBytes : 0) + 16 * i);
  if (16 * i < T::kMetaBytes) {
    ptx::CopyAsync16(ptx::SharedAddress(stage.meta + 16 * i),
                     tile + 2 * T::kCodeBytes + (work.value ? T::kMetaBytes : 0) + 16 * i);
  }
  if (i < kTokens) {
    const int token = next.first_token + i, block = token / p.kv.block_tokens;
    ptx::CopyAsync4(
        ptx::SharedAddress(stage.block + i),
        p.kv.block_table + static_cast<int64_t>(next.sequence) * p.kv.blocks_max + block);
    stage.row[i] = token - block * p.kv.block_tokens;
  }
}

// R' of one head as MMA operands. Column g of 8-column tile n is channel 32 warp + 8 (g / 2) + 2 n
// + g % 2, so that a lane's outputs are 8 neighbouring channels. Elements are divided by the power
// of two that CodePair multiplies codes with, and multiplied by 2^8.
template <class T>
struct RotationFragments {
  uint32_t b[T::kSteps][4][2];
  static constexpr float kUnit = 65536.0f;  // factor by which MMA results are too small

  __device__ __forceinline__ void Load(const float* rotation, int warp, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* row = rotation + (32 * warp + 8 * (g / 2) + 2 * n + g % 2) * T::kDim + 2 * c;
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 r = __ldg(reinterpret_cast<const float2*>(row + 16 * s + 8 * half));
          const float unit = PowerOfTwo(8 - CodeShift(2 * (s % 4) + half));
          b[s][n][half] = ptx::PackHalf(r.x * unit, r.y * unit);
        }
      }
    }
  }

  // Sums the rounded operands over each group's channels.
  __device__ __forceinline__ void SumColumns(int warp, int lane,
                                             float (&column_sum)[T::kGroups][T::kDim]) const {
    const int g = lane / 4;
#pragma unroll
    for (int y = 0; y < T::kGroups; ++y) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float sum = 0.0f;
#pragma unroll
        for (int s = y * T::kStepsPerGroup; s < (y + 1) * T::kStepsPerGroup; ++s) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float unit = PowerOfTwo(CodeShift(2 * (s % 4) + half) - 8);
            sum = fmaf(ptx::LowHalf(b[s][n][half]) + ptx::HighHalf(b[s][n][half]), unit, sum);
          }
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) column_sum[y][32 * warp + 8 * (g / 2) + 2 * n + g % 2] = sum;
      }
    }
    __syncwarp();
  }
};

template <class T>
__device__ __forceinline__ void LoadEight(const float* from, float (&x)[8]) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// Returns the words (scale, minimum) of tokens r (x) and r + 8 (y) of 16-token group u.
template <class T>
__device__ __forceinline__ uint2 LoadMeta(const Stage<T>& stage, int group, int lane, int u) {
  return *reinterpret_cast<const uint2*>(stage.meta + 4 * kTokens * group + 32 * (lane / 4) +
                                         8 * u);
}

// Computes rotated rows r + 8 a of 16 tokens, channels 32 warp + 8 c to 32 warp + 8 c + 7.
template <class T>
__device__ __forceinline__ void RotateGroup(const Stage<T>& stage, bool value, int u, int lane,
                                            const RotationFragments<T>& rotation,
                                            const float* column_sum, const float (&mean)[8],
                                            float (&out)[2][8]) {
  uint32_t w[T::kWords];
#pragma unroll
  for (int i = 0; i < T::kWords; i += T::kWordsTogether) {
    const char* at = stage.codes + 4 * T::kDim * u + 128 * i + 4 * T::kWordsTogether * lane;
    if constexpr (T::kWordsTogether == 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(at);
      w[i] = x.x, w[i + 1] = x.y;
    }
  }
  if (value) {
#pragma unroll
    for (int i = 0; i < T::kWords; ++i) w[i] = ptx::TransposeMatrix(w[i]);
  }
#pragma unroll
  for (int a = 0; a < 2; ++a) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[a][i] = mean[i];
  }
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    float acc[4][4] = {};
#pragma unroll
    for (int s = y * T::kStepsPerGroup; s < (y + 1) * T::kStepsPerGroup; ++s) {
      const int i = 2 * (s / 4), j = 2 * (s % 4);
      const uint32_t a0 = CodePair(w[i], j), a1 = CodePair(w[i + 1], j);
      const uint32_t a2 = CodePair(w[i], j + 1), a3 = CodePair(w[i + 1], j + 1);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        ptx::MmaF16(acc[n], a0, a1, a2, a3, rotation.b[s][n][0], rotation.b[s][n][1]);
      }
    }
    const uint2 meta = LoadMeta<T>(stage, y, lane, u);
    float sums[8];
    LoadEight<T>(column_sum + y * T::kDim, sums);
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const uint32_t m = a == 0 ? meta.x : meta.y;
      const float scale = ptx::LowHalf(m) * rotation.kUnit, minimum = ptx::HighHalf(m);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[a][i] = fmaf(acc[i / 2][2 * a + i % 2], scale, fmaf(minimum, sums[i], out[a][i]));
      }
    }
  }
}

// Computes the same rows without rotation: scale * code + minimum.
template <class T>
__device__ __forceinline__ void ExpandGroup(const Stage<T>& stage, bool value, int u, int warp,
                                            int lane, const float (&mean)[8], float (&out)[2][8]) {
  const int first = 2 * (warp / 2);
  const char* at = stage.codes + 4 * T::kDim * u +
                   128 * T::kWordsTogether * (first / T::kWordsTogether) +
                   4 * T::kWordsTogether * lane + 4 * (first % T::kWordsTogether);
  const uint2 own = *reinterpret_cast<const uint2*>(at);
  const uint2 meta = LoadMeta<T>(stage, 32 * warp * T::kGroups / T::kDim, lane, u);
  // The 8 channels of lane c are code pair j of the words of the four lanes that share the row.
  const int j = (4 * warp + lane) % 4 + 4 * (warp % 2);
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    uint32_t word = a == 0 ? own.x : own.y;
    if (value) word = ptx::TransposeMatrix(word);
    const uint32_t m = a == 0 ? meta.x : meta.y;
    const float scale = ptx::LowHalf(m), minimum = ptx::HighHalf(m);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t other = __shfl_sync(~0u, word, lane / 4 * 4 + i) >> (2 * j);
      out[a][2 * i] = fmaf(__uint2float_rn(other & 3), scale, minimum) + mean[2 * i];
      out[a][2 * i + 1] =
          fmaf(__uint2float_rn((other >> 16) & 3), scale, minimum) + mean[2 * i + 1];
    }
  }
}

// scale: the factor of FP8 elements; not used for BF16.
template <class T>
__device__ __forceinline__ void StoreGroup(const PagedKv& kv, const Stage<T>& stage, uint64_t base,
                                           float scale, int u, int lane, const float (&out)[2][8]) {
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const int token = kGroupTokens * u + 8 * a + lane / 4;
    const int block = stage.block[token];
    if (block < 0) continue;
    const uint64_t row = base + block * kv.block_stride + stage.row[token] * kv.token_stride;
    const uint4 rounded =
        make_uint4(ptx::PackBf16(out[a][0], out[a][1]), ptx::PackBf16(out[a][2], out[a][3]),
                   ptx::PackBf16(out[a][4], out[a][5]), ptx::PackBf16(out[a][6], out[a][7]));
    if (kv.element == KvElement::kBf16) {
      __stcs(reinterpret_cast<uint4*>(row), rounded);
    } else {
      __stcs(reinterpret_cast<uint2*>(row), Fp8Elements(rounded, scale));
    }
  }
}

template <class T, bool kRotated>
__device__ __forceinline__ void DequantizeItems(const DequantizeParams& p, const WorkRange& work,
                                                Shared<T>& shared) {
  const DequantizeTransform& transform = work.value ? p.v : p.k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = 32 * warp + 8 * (lane % 4);
  NextPage next = LoadPage(p, work, work.begin);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    StartCopies<T>(p, work, work.begin + i, next, shared.stages[i]);
    ptx::CommitCopies();
    next = LoadPage(p, work, work.begin + i + 1);
  }
  RotationFragments<T> rotation;
  uint64_t base = 0;
  float scale = 1.0f;
  int64_t mean_at = -1;
  float mean[8] = {};
  int layer = -1, slot = 0;
  for (int64_t item = work.begin; item < work.end; ++item) {
    const int page = static_cast<int>(item % work.pages);
    if (item / work.pages != layer) {
      layer = static_cast<int>(item / work.pages);
      base = (work.value ? p.kv.v_address : p.kv.k_address)[layer] + work.head * p.kv.head_stride +
             (p.kv.element == KvElement::kBf16 ? 2 : 1) * channel;
      const float* scales = work.value ? p.v_scale : p.k_scale;
      if (scales != nullptr) scale = scales[layer];
      if constexpr (kRotated) {
        const int64_t matrix = static_cast<int64_t>(layer) * p.kv_heads + work.head;
        rotation.Load(transform.rotation + matrix * T::kDim * T::kDim, warp, lane);
        rotation.SumColumns(warp, lane, shared.column_sum);
      }
    }
    if (transform.mean != nullptr) {
      const int block = p.position_block != nullptr ? p.position_block[page] : 0;
      const int64_t at =
          (static_cast<int64_t>(layer) * p.kv_heads + work.head) * p.position_blocks + block;
      if (at != mean_at) LoadEight<T>(transform.mean + at * T::kDim + channel, mean);
      mean_at = at;
    }
    ptx::WaitCopies<kStages - 2>();
    __syncthreads();
    StartCopies<T>(p, work, item + kStages - 1, next,
                   shared.stages[(slot + kStages - 1) % kStages]);
    ptx::CommitCopies();
    next = LoadPage(p, work, item + kStages);
    const Stage<T>& stage = shared.stages[slot];
#pragma unroll 2
    for (int u = 0; u < kTokens / kGroupTokens; ++u) {
      float out[2][8];
      if constexpr (kRotated) {
        RotateGroup<T>(stage, work.value, u, lane, rotation, &shared.column_sum[0][channel], mean,
                       out);
      } else {
        ExpandGroup<T>(stage, work.value, u, warp, lane, mean, out);
      }
      StoreGroup<T>(p.kv, stage, base, scale, u, lane, out);
    }
    slot = (slot + 1) % kStages;
  }
  ptx::WaitCopies<0>();
}

template <class T, bool kRotated>
__global__ void __launch_bounds__(T::kThreads, kRotated ? T::kRotatedBlocks : T::kExpandBlocks)
    DequantizeKernel(const __grid_constant__ DequantizeParams p, BlockCounts counts) {
  __shared__ Shared<T> shared;
  const WorkRange work(p, counts);
  if (work.begin >= work.end) return;
  if constexpr (kRotated) {
    if ((work.value ? p.v : p.k).rotation != nullptr) {
      DequantizeItems<T, true>(p, work, shared);
      return;
    }
  }
  DequantizeItems<T, false>(p, work, shared);
}

template <int dim, int group_size>
cudaError_t Launch(const DequantizeParams& p, cudaStream_t stream) {
  using T = Traits<dim, group_size>;
  DeviceLimits limits;
  const cudaError_t error = CompleteLimits(&limits);
  if (error != cudaSuccess) return error;
  // Measured time of a rotated row relative to one that is only expanded.
  constexpr double kRotatedCost = 1.35;
  const double k_cost = p.k.rotation != nullptr ? kRotatedCost : 1.0;
  const double v_cost = p.v.rotation != nullptr ? kRotatedCost : 1.0;
  const int items =
      static_cast<int>(std::min<int64_t>(static_cast<int64_t>(p.layers) * p.pages_max, 1 << 20));
  const bool rotated = p.k.rotation != nullptr || p.v.rotation != nullptr;
  const int blocks = limits.processors * (rotated ? T::kRotatedBlocks : T::kExpandBlocks);
  const int all = std::max(blocks / p.kv_heads, 2);
  const int k_lanes = static_cast<int>(all * k_cost / (k_cost + v_cost) + 0.5);
  const BlockCounts counts = {std::clamp(k_lanes, 1, items), std::clamp(all - k_lanes, 1, items)};
  const int grid = (counts.k + counts.v) * p.kv_heads;
  if (rotated) {
    DequantizeKernel<T, true><<<grid, T::kThreads, 0, stream>>>(p, counts);
  } else {
    DequantizeKernel<T, false><<<grid, T::kThreads, 0, stream>>>(p, counts);
  }
  return cudaGetLastError();
}

}  // namespace

void PagedKv::SetStrides(KvLayout layout, KvPlacement placement, int kv_heads, int head_dim) {
  const int64_t row = head_dim * (element == KvElement::kBf16 ? 2 : 1);
  token_stride = layout == KvLayout::kNhd ? row * kv_heads : row;
  head_stride = layout == KvLayout::kNhd ? row : row * block_tokens;
  block_stride = row * kv_heads * block_tokens * (placement == KvPlacement::kTogether ? 2 : 1);
}

bool DequantizeSupported(const TileShape& tile) { return tile.Valid() && tile.tokens == kTokens; }

cudaError_t DequantizePages(const DequantizeParams& p, cudaStream_t stream) {
  if (!DequantizeSupported(p.tile) || !p.kv.Valid() || p.layers < 1 || p.kv_heads < 1 ||
      p.pages_max < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.format == PageFormat::kBf16) return ScatterPages(p, stream);
  const int group = p.tile.group_size;
  if (p.tile.head_dim == 64) {
    return group == 64 ? Launch<64, 64>(p, stream) : Launch<64, 32>(p, stream);
  }
  if (p.tile.head_dim == 128) {
    if (group == 128) return Launch<128, 128>(p, stream);
    return group == 64 ? Launch<128, 64>(p, stream) : Launch<128, 32>(p, stream);
  }
  if (group == 128) return Launch<256, 128>(p, stream);
  return group == 64 ? Launch<256, 64>(p, stream) : Launch<256, 32>(p, stream);
}

}  // namespace crumb::kernels::cuda
