// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/random_data.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bench/kernels/device_rates.h"

namespace crumb::bench {
namespace {

// Hashes a counter to 32 bits.
__device__ uint32_t Mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<uint32_t>(x);
}

__device__ float Uniform(uint64_t x) { return (static_cast<float>(Mix(x) >> 8) + 0.5f) * 0x1p-24f; }

__global__ void TileKernel(size_t words, uint32_t tile_words, uint32_t code_words, uint32_t seed,
                           uint32_t* out) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += stride) {
    const uint64_t key = (static_cast<uint64_t>(seed) << 40) + i;
    if (i % tile_words < code_words) {
      out[i] = Mix(key);
    } else {
      const float scale = 0.6f + 0.6f * Uniform(key);
      const __half2 meta = __floats2half2_rn(scale, -1.5f * scale + 0.4f * Uniform(~key) - 0.2f);
      out[i] = reinterpret_cast<const uint32_t&>(meta);
    }
  }
}

__global__ void NormalKernel(size_t count, uint32_t seed, __nv_bfloat16* out) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const uint64_t key = (static_cast<uint64_t>(seed) << 40) + 2 * i;
    const float x = sqrtf(-2.0f * logf(Uniform(key))) * cospif(2.0f * Uniform(key + 1));
    out[i] = __float2bfloat16(x);
  }
}

}  // namespace

void FillTiles(const kernels::TileShape& shape, size_t count, uint32_t seed, uint8_t* tiles) {
  const size_t tile_words = shape.int2_bytes() / 4;
  TileKernel<<<1024, 256>>>(count * tile_words, static_cast<uint32_t>(tile_words),
                            static_cast<uint32_t>(shape.code_bytes() / 2), seed,
                            reinterpret_cast<uint32_t*>(tiles));
  Check(cudaGetLastError(), "fill tiles");
  Check(cudaDeviceSynchronize(), "fill tiles");
}

void FillBf16(size_t count, uint32_t seed, kernels::Bf16* values) {
  NormalKernel<<<1024, 256>>>(count, seed, reinterpret_cast<__nv_bfloat16*>(values));
  Check(cudaGetLastError(), "fill rows");
  Check(cudaDeviceSynchronize(), "fill rows");
}

}  // namespace crumb::bench
