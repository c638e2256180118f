// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/common/device_limits.h"
#include "kernels/cuda/pages/fp8_rows.cuh"
#include "kernels/cuda/pages/pages.h"

// Scatter: rows of BF16 tiles are copied into an engine's blocks, the inverse of quantize-from's
// gather.
namespace crumb::kernels::cuda {
namespace {

constexpr int kScatterThreads = 256;

// Each thread moves 8 elements. Neighbouring threads have neighbouring channels, then heads, then
// tokens, so that the writes of a warp are dense in an engine's NHD blocks.
__global__ void __launch_bounds__(kScatterThreads)
    ScatterKernel(const __grid_constant__ DequantizeParams p) {
  const int pages = max(0, min(*p.pages, p.pages_max));
  const int pieces = p.tile.head_dim / 8;
  const int64_t part_bytes = int64_t{2} * p.tile.tokens * p.tile.head_dim;
  const int64_t all = int64_t{2} * pages * p.layers * p.tile.tokens * p.kv_heads * pieces;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kScatterThreads;
  for (int64_t at = blockIdx.x * kScatterThreads + threadIdx.x; at < all; at += stride) {
    int64_t i = at;
    const int piece = static_cast<int>(i % pieces);
    i /= pieces;
    const int head = static_cast<int>(i % p.kv_heads);
    i /= p.kv_heads;
    const int token = static_cast<int>(i % p.tile.tokens);
    i /= p.tile.tokens;
    const bool value = i % 2 == 1;
    i /= 2;
    const int layer = static_cast<int>(i % p.layers), page = static_cast<int>(i / p.layers);
    const int position = p.tokens.first_token[page] + token;
    const int column = position / p.kv.block_tokens;
    const int block =
        p.kv.block_table[static_cast<int64_t>(p.tokens.sequence[page]) * p.kv.blocks_max + column];
    if (block < 0) continue;
    const uint64_t from = p.page_address[page] + layer * p.tile_layer_stride +
                          head * p.tile_head_stride + (value ? part_bytes : 0) +
                          (int64_t{token} * pieces + piece) * 16;
    const uint64_t to =
        (value ? p.kv.v_address : p.kv.k_address)[layer] + block * p.kv.block_stride +
        (position - column * p.kv.block_tokens) * p.kv.token_stride + head * p.kv.head_stride;
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from));
    if (p.kv.element == KvElement::kBf16) {
      reinterpret_cast<uint4*>(to)[piece] = x;
      continue;
    }
    const float* scales = value ? p.v_scale : p.k_scale;
    const float scale = scales != nullptr ? scales[layer] : 1.0f;
    reinterpret_cast<uint2*>(to)[piece] = Fp8Elements(x, scale);
  }
}

}  // namespace

cudaError_t ScatterPages(const DequantizeParams& p, cudaStream_t stream) {
  if (!DequantizeSupported(p.tile) || !p.kv.Valid() || p.layers < 1 || p.kv_heads < 1 ||
      p.pages_max < 1) {
    return cudaErrorInvalidValue;
  }
  DeviceLimits limits;
  const cudaError_t error = CompleteLimits(&limits);
  if (error != cudaSuccess) return error;
  const int64_t pieces =
      int64_t{2} * p.pages_max * p.layers * p.tile.tokens * p.kv_heads * (p.tile.head_dim / 8);
  const int64_t blocks = std::min<int64_t>((pieces + kScatterThreads - 1) / kScatterThreads,
                                           static_cast<int64_t>(limits.processors) * 8);
  ScatterKernel<<<static_cast<int>(blocks), kScatterThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
