// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/pages.h"

namespace crumb::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kLanes = 32;

// Copies a query row of a sampled KV head to `held`.
__device__ __forceinline__ void StoreHeldQuery(const QueryOffsetsParams& p, int64_t row,
                                               int kv_head, int lane) {
  const int token = static_cast<int>(row / p.q_heads), group = p.q_heads / p.kv_heads;
  if (p.held_head[token / p.held_tokens] != kv_head + 1) return;
  const int64_t to = int64_t{token % p.held_tokens} * group + row % p.q_heads % group;
  for (int i = lane; i < p.head_dim; i += kLanes) {
    p.held[to * p.head_dim + i] = p.q[row * p.head_dim + i];
  }
}

// Each warp computes the offsets of one query row; a lane sums every 32nd channel.
__global__ void __launch_bounds__(kWarps* kLanes)
    QueryOffsetsKernel(const __grid_constant__ QueryOffsetsParams p) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  if (row >= int64_t{p.tokens} * p.q_heads) return;
  const int kv_head = static_cast<int>(row % p.q_heads) / (p.q_heads / p.kv_heads);
  if (p.held_head != nullptr) StoreHeldQuery(p, row, kv_head, lane);
  const float* mean = p.mean_k + int64_t{kv_head} * p.head_dim * p.position_blocks;
  for (int block = 0; block < p.position_blocks; ++block) {
    float sum = 0.0f;
    for (int i = lane; i < p.head_dim; i += kLanes) {
      const uint32_t bits = uint32_t{p.q[row * p.head_dim + i].bits} << 16;
      sum += __uint_as_float(bits) * mean[int64_t{i} * p.position_blocks + block];
    }
    for (int other = kLanes / 2; other > 0; other /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, other);
    }
    if (lane == 0) p.offset[row * p.position_blocks + block] = sum;
  }
}

}  // namespace

cudaError_t QueryOffsets(const QueryOffsetsParams& p, cudaStream_t stream) {
  if (p.tokens < 1 || p.kv_heads < 1 || p.q_heads % p.kv_heads != 0 || p.head_dim < 1 ||
      p.position_blocks < 1 || p.held_tokens < 1) {
    return cudaErrorInvalidValue;
  }
  const int64_t rows = int64_t{p.tokens} * p.q_heads;
  QueryOffsetsKernel<<<static_cast<unsigned>((rows + kWarps - 1) / kWarps), kWarps * kLanes, 0,
                       stream>>>(p);
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
