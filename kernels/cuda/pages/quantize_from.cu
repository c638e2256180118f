// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/common/device_limits.h"
#include "kernels/cuda/pages/fp8_rows.cuh"
#include "kernels/cuda/pages/pages.h"

// Quantize-from: a kernel gathers the rows of an engine's pages into a scratch ring, and
// EvictWindows quantizes that ring.
namespace crumb::kernels::cuda {
namespace {

constexpr int kGatherThreads = 256;

// Layout of the workspace: ring_address, ring_begin, then rows [window, layer, head, K or V, token,
// head_dim].
struct GatherLayout {
  size_t begin_offset;  // offset of ring_begin
  size_t rows_offset;
  size_t bytes;
  int64_t part_stride, head_stride, layer_stride, window_stride;  // bytes

  explicit GatherLayout(const EvictParams& p) {
    const auto round = [](size_t x) { return (x + 255) / 256 * 256; };
    begin_offset = round(8 * static_cast<size_t>(p.windows_max));
    rows_offset = begin_offset + round(4 * static_cast<size_t>(p.windows_max));
    part_stride = int64_t{2} * p.tile.tokens * p.tile.head_dim;
    head_stride = 2 * part_stride;
    layer_stride = p.kv_heads * head_stride;
    window_stride = p.layers * layer_stride;
    bytes = rows_offset + static_cast<size_t>(window_stride) * p.windows_max;
  }
};

// Each thread moves 8 elements. Neighbouring threads have neighbouring channels, then heads, then
// tokens.
__global__ void __launch_bounds__(kGatherThreads)
    GatherKernel(const __grid_constant__ QuantizeFromParams p, GatherLayout layout) {
  const EvictParams& e = p.evict;
  char* workspace = static_cast<char*>(p.workspace);
  const int windows = max(0, min(*e.windows, e.windows_max));
  const int pieces = e.tile.head_dim / 8;
  const int64_t all = int64_t{2} * windows * e.layers * e.tile.tokens * e.kv_heads * pieces;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kGatherThreads;
  for (int64_t at = blockIdx.x * kGatherThreads + threadIdx.x; at < all; at += stride) {
    int64_t i = at;
    const int piece = static_cast<int>(i % pieces);
    i /= pieces;
    const int head = static_cast<int>(i % e.kv_heads);
    i /= e.kv_heads;
    const int token = static_cast<int>(i % e.tile.tokens);
    i /= e.tile.tokens;
    const bool value = i % 2 == 1;
    i /= 2;
    const int layer = static_cast<int>(i % e.layers), window = static_cast<int>(i / e.layers);
    const int position = p.tokens.first_token[window] + token;
    const int column = position / p.kv.block_tokens;
    const int block =
        p.kv.block_table[static_cast<int64_t>(p.tokens.sequence[window]) * p.kv.blocks_max +
                         column];
    uint4 x = make_uint4(0, 0, 0, 0);
    if (block >= 0) {
      const uint64_t row =
          (value ? p.kv.v_address : p.kv.k_address)[layer] + block * p.kv.block_stride +
          (position - column * p.kv.block_tokens) * p.kv.token_stride + head * p.kv.head_stride;
      if (p.kv.element == KvElement::kBf16) {
        x = __ldcs(reinterpret_cast<const uint4*>(row) + piece);
      } else {
        const float* scales = value ? p.v_scale : p.k_scale;
        const float scale = scales != nullptr ? scales[layer] : 1.0f;
        const uint2 codes = __ldcs(reinterpret_cast<const uint2*>(row) + piece);
        x = Bf16Elements(codes, scale);
      }
    }
    char* to = workspace + layout.rows_offset + window * layout.window_stride +
               layer * layout.layer_stride + head * layout.head_stride +
               (value ? layout.part_stride : 0) + (token * pieces + piece) * 16;
    *reinterpret_cast<uint4*>(to) = x;
  }
  for (int window = blockIdx.x * kGatherThreads + threadIdx.x; window < windows;
       window += static_cast<int>(stride)) {
    reinterpret_cast<uint64_t*>(workspace)[window] =
        reinterpret_cast<uint64_t>(workspace) + layout.rows_offset + window * layout.window_stride;
    reinterpret_cast<int32_t*>(workspace + layout.begin_offset)[window] = 0;
  }
}

}  // namespace

size_t QuantizeFromWorkspaceBytes(const EvictParams& evict) { return GatherLayout(evict).bytes; }

cudaError_t QuantizeFromPages(const QuantizeFromParams& p, cudaStream_t stream) {
  if (!EvictSupported(p.evict.tile) || !p.kv.Valid() || p.evict.windows_max < 1) {
    return cudaErrorInvalidValue;
  }
  DeviceLimits limits;
  const cudaError_t error = CompleteLimits(&limits);
  if (error != cudaSuccess) return error;
  const GatherLayout layout(p.evict);
  const int64_t pieces = layout.window_stride / 16 * p.evict.windows_max;
  const int64_t blocks = std::min<int64_t>((pieces + kGatherThreads - 1) / kGatherThreads,
                                           static_cast<int64_t>(limits.processors) * 8);
  GatherKernel<<<static_cast<int>(blocks), kGatherThreads, 0, stream>>>(p, layout);
  const cudaError_t launched = cudaGetLastError();
  if (launched != cudaSuccess) return launched;

  char* workspace = static_cast<char*>(p.workspace);
  EvictParams evict = p.evict;
  evict.ring_address = reinterpret_cast<const uint64_t*>(workspace);
  evict.ring_begin = reinterpret_cast<const int32_t*>(workspace + layout.begin_offset);
  evict.ring_capacity = evict.tile.tokens;
  evict.ring_layer_stride = layout.layer_stride;
  evict.ring_head_stride = layout.head_stride;
  evict.ring_token_stride = 2 * evict.tile.head_dim;
  evict.ring_v_offset = layout.part_stride;
  evict.overlap_previous = false;  // the previous kernel is the gather, whose rows are read
  return EvictWindows(evict, stream);
}

}  // namespace crumb::kernels::cuda
