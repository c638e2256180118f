// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode/step_weights.h"

#include "models/cuda/launch.cuh"

namespace crumb::bench {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 8;
constexpr int kPieceVectors = kThreads * kUnroll;  // 64 KiB, the piece of a block

// Each block reads one piece of one expert.
__global__ void __launch_bounds__(kThreads)
    ReadKernel(const uint4* experts, int64_t vectors, const int32_t* ids, uint32_t* unused) {
  models::cuda::WaitForPrevious();  // a model would choose the experts in the previous kernel
  const uint4* from = experts + ids[blockIdx.y] * vectors;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPieceVectors + threadIdx.x;
  uint32_t sum = 0;
  uint4 x[kUnroll] = {};
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int64_t i = first + j * kThreads;
    if (i < vectors) x[j] = __ldcs(from + i);
  }
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  if (sum == 0x12345678u) *unused = sum;  // keeps the compiler from omitting the loads
}

}  // namespace

cudaError_t ReadExperts(const uint8_t* experts, int64_t bytes, const int32_t* ids, int count,
                        uint32_t* unused, cudaStream_t stream) {
  if (bytes < 16 || bytes % 16 != 0 || count < 1 || count > 65535) return cudaErrorInvalidValue;
  const int64_t vectors = bytes / 16;
  const dim3 grid(static_cast<unsigned>((vectors + kPieceVectors - 1) / kPieceVectors), count);
  return models::cuda::Launch(ReadKernel, grid, kThreads, stream,
                              reinterpret_cast<const uint4*>(experts), vectors, ids, unused);
}

}  // namespace crumb::bench
