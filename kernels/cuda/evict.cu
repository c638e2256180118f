// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/quantize_rows.cuh"

// A block keeps one R, split in two bf16 parts, in shared memory and passes the rows of its windows
// through it, 16 rows a warp: the product on the tensor cores, everything else in the accumulators.
// docs/kernels/cuda.md has the account.
namespace crumb::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 64;
constexpr int kWindowRows = 16;  // rows of a warp: one 16-token group of the tile
constexpr int kGroupsPerWindow = kTokens / kWindowRows;

// The k-th pair of fragment channels is not the k-th pair of the row: lane c reads channels
// 32 p + 8 c .. + 7 by one 16-byte load and takes them for columns 2 c and 2 c + 8 of two steps.
__device__ __forceinline__ int ChannelOf(int step, int c, int b) {
  return 32 * (step / 2) + 8 * c + 4 * (step % 2) + 2 * b;
}

// Items are counted (layer, head, K or V) outermost, then windows.
struct Item {
  int window;
  int layer;
  int head;
  bool value;
};
__device__ __forceinline__ Item ItemOf(const EvictParams& p, int matrix) {
  return {0, matrix / 2 / p.kv_heads, matrix / 2 % p.kv_heads, matrix % 2 == 1};
}

// Fills `fragments` [step][tile][lane] with the high and low parts of one R.
template <class T>
__device__ void LoadRotation(const float* rotation, uint4* fragments) {
  constexpr int kSteps = T::kDim / 16;
#pragma unroll 16
  for (int i = threadIdx.x; i < kSteps * T::kTiles * 32; i += kThreads) {
    // Neighbouring threads take neighbouring columns: r varies fastest.
    const int r = i % 8, n = i / 8 % T::kTiles, c = i / (8 * T::kTiles) % 4,
              step = i / (32 * T::kTiles);
    uint32_t high[2], low[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float* at = rotation + ChannelOf(step, c, b) * T::kDim + 8 * n + r;
      ptx::SplitBf16(at[0], at[T::kDim], &high[b], &low[b]);
    }
    fragments[(step * T::kTiles + n) * 32 + 4 * r + c] =
        make_uint4(high[0], high[1], low[0], low[1]);
  }
}

// Rows r and r + 8 of the group as pairs of channels: x[a][4 p + i] is channels 32 p + 8 c + 2 i.
template <class T>
__device__ __forceinline__ void LoadRows(const EvictParams& p, const Item& item, int group,
                                         uint32_t (&x)[2][T::kDim / 8]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const int token = kWindowRows * group + lane / 4 + 8 * a;
    const int slot = (p.ring_begin[item.window] + token) % p.ring_capacity;
    const uint64_t address = p.ring_address[item.window] + item.layer * p.ring_layer_stride +
                             item.head * p.ring_head_stride + slot * p.ring_token_stride +
                             (item.value ? p.ring_v_offset : 0);
    const uint4* row = reinterpret_cast<const uint4*>(address) + lane % 4;
#pragma unroll
    for (int i = 0; i < T::kDim / 32; ++i) {
      const uint4 four = __ldcs(row + 4 * i);
      x[a][4 * i] = four.x, x[a][4 * i + 1] = four.y;
      x[a][4 * i + 2] = four.z, x[a][4 * i + 3] = four.w;
    }
  }
}

// y = x R in accumulator order.
template <class T>
__device__ __forceinline__ void Rotate(const uint32_t (&x)[2][T::kDim / 8], const uint4* fragments,
                                       float (&y)[T::kTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[n][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < T::kDim / 16; ++step) {
    const int at = 2 * step;
    const uint32_t a[4] = {x[0][at], x[1][at], x[0][at + 1], x[1][at + 1]};
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
      const uint4 r = fragments[(step * T::kTiles + n) * 32 + lane];
      ptx::MmaBf16(y[n], a, r.z, r.w);
      ptx::MmaBf16(y[n], a, r.x, r.y);
    }
  }
}

// Brings rows as they are into accumulator order: channel 8 n + 2 c + e of a lane.
template <class T>
__device__ __forceinline__ void Spread(const uint32_t (&x)[2][T::kDim / 8],
                                       float (&y)[T::kTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < T::kTiles; ++n) {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      // The 8 channels of a tile are the four words of lane n % 4.
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t other = __shfl_sync(~0u, x[a][n / 4 * 4 + i], lane / 4 * 4 + n % 4);
        if (lane % 4 == i) word = other;
      }
      y[n][2 * a] = ptx::LowBf16(word);
      y[n][2 * a + 1] = ptx::HighBf16(word);
    }
  }
}

// Writes the group's codes and metadata.
template <class T>
__device__ __forceinline__ void StoreGroup(const EvictParams& p, const Item& item, int group,
                                           const uint32_t (&words)[T::kTiles / 4],
                                           const uint32_t (&meta)[T::kGroups][2]) {
  constexpr int kCodeBytes = kTokens * T::kDim / 4, kMetaBytes = kTokens * T::kGroups * 4;
  constexpr int kWide = T::kDim % 128 == 0 ? 4 : 2;  // words of a lane side by side
  const int lane = threadIdx.x % 32;
  char* tile =
      reinterpret_cast<char*>(p.tile_address[item.window] + item.layer * p.tile_layer_stride +
                              item.head * p.tile_head_stride);
  char* codes = tile + (item.value ? kCodeBytes : 0) + 4 * T::kDim * group;
  uint32_t out[T::kTiles / 4];
#pragma unroll
  for (int i = 0; i < T::kTiles / 4; ++i) {
    // V's words hold tokens along lanes' columns: each 16-bit half of a K word moves as one.
    out[i] = item.value ? ptx::TransposeMatrix(words[i]) : words[i];
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
  if (lane % 4 != 0) return;
  char* meta_at =
      tile + 2 * kCodeBytes + (item.value ? kMetaBytes : 0) + kTokens / 2 * (lane / 4) + 8 * group;
#pragma unroll
  for (int y = 0; y < T::kGroups; ++y) {
    *reinterpret_cast<uint2*>(meta_at + 4 * kTokens * y) = make_uint2(meta[y][0], meta[y][1]);
  }
}

template <class T>
__device__ __forceinline__ void EvictGroup(const EvictParams& p, const Item& item, int group,
                                           float quantile, const uint4* fragments) {
  const EvictTransform& transform = item.value ? p.v : p.k;
  float y[T::kTiles][4];
  {
    uint32_t x[2][T::kDim / 8];
    LoadRows<T>(p, item, group, x);
    if (transform.rotation != nullptr) {
      Rotate<T>(x, fragments, y);
    } else {
      Spread<T>(x, y);
    }
  }
  if (transform.mean != nullptr) {
    const float* mean = transform.mean +
                        (static_cast<int64_t>(item.layer) * p.kv_heads + item.head) * T::kDim +
                        threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < T::kTiles; ++n) {
      const float2 m = *reinterpret_cast<const float2*>(mean + 8 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[n][i] -= i % 2 == 0 ? m.x : m.y;
    }
  }
  uint32_t words[T::kTiles / 4], meta[T::kGroups][2];
  const uint32_t status = QuantizeRows<T>(y, transform.clip, quantile, words, meta);
  StoreGroup<T>(p, item, group, words, meta);
  if (p.status != nullptr && status != 0) atomicOr(p.status + item.window, status);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    EvictKernel(const __grid_constant__ EvictParams p, float2 quantile) {
  extern __shared__ uint4 fragments[];
  const int groups = *p.windows * kGroupsPerWindow;  // 16-row groups of one matrix
  const int64_t all = static_cast<int64_t>(p.layers) * p.kv_heads * 2 * groups;
  const int64_t begin = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
  for (int64_t at = begin; at < end;) {
    const int matrix = static_cast<int>(at / groups);
    const int first = static_cast<int>(at % groups);
    const int last = static_cast<int>(min(static_cast<int64_t>(groups), first + end - at));
    Item item = ItemOf(p, matrix);
    const float* rotation = item.value ? p.v.rotation : p.k.rotation;
    if (rotation != nullptr) {
      __syncthreads();
      LoadRotation<T>(rotation + static_cast<int64_t>(matrix / 2) * T::kDim * T::kDim, fragments);
      __syncthreads();
    }
    for (int i = first + threadIdx.x / 32; i < last; i += kWarps) {
      item.window = i / kGroupsPerWindow;
      EvictGroup<T>(p, item, i % kGroupsPerWindow, item.value ? quantile.y : quantile.x, fragments);
    }
    at += last - first;
  }
}

// The x that |y| / sigma of normal y stays under with this probability.
float TailQuantile(float probability) {
  double low = 0.0, high = 6.0;
  for (int i = 0; i < 40; ++i) {
    const double middle = 0.5 * (low + high);
    (std::erf(middle / std::sqrt(2.0)) < probability ? low : high) = middle;
  }
  return static_cast<float>(low);
}

template <int dim, int group_size>
cudaError_t Launch(const EvictParams& p, cudaStream_t stream) {
  using T = RowTraits<dim, group_size>;
  constexpr int kSharedBytes = dim * dim * 4;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(EvictKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  const int64_t groups =
      static_cast<int64_t>(p.layers) * p.kv_heads * 2 * p.windows_max * kGroupsPerWindow;
  const int64_t blocks = std::min<int64_t>(2 * processors, (groups + kWarps - 1) / kWarps);
  EvictKernel<T><<<static_cast<int>(blocks), kThreads, kSharedBytes, stream>>>(
      p, make_float2(TailQuantile(p.k.clip), TailQuantile(p.v.clip)));
  return cudaGetLastError();
}

}  // namespace

bool EvictSupported(const TileShape& tile) {
  return tile.Valid() && tile.tokens == kTokens && tile.head_dim <= 128;
}

cudaError_t EvictWindows(const EvictParams& p, cudaStream_t stream) {
  if (!EvictSupported(p.tile)) return cudaErrorInvalidValue;
  if (p.tile.head_dim == 128) {
    if (p.tile.group_size == 128) return Launch<128, 128>(p, stream);
    if (p.tile.group_size == 64) return Launch<128, 64>(p, stream);
    return Launch<128, 32>(p, stream);
  }
  return p.tile.group_size == 64 ? Launch<64, 64>(p, stream) : Launch<64, 32>(p, stream);
}

}  // namespace crumb::kernels::cuda
