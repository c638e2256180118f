// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/product_chain.h"

#include "models/cuda/launch.cuh"

namespace crumb::models::cuda {
namespace {

namespace ptx = kernels::cuda::ptx;

constexpr int kThreads = 128;
constexpr int kOutputs = 4;  // outputs of a block
constexpr int kVector = 8;

__device__ __forceinline__ void Widen(uint4 v, float (&x)[kVector]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = ptx::LowBf16(words[i]);
    x[2 * i + 1] = ptx::HighBf16(words[i]);
  }
}

// A thread's vectors of kOutputs rows of W at one offset; zeros beyond the end.
struct Weights {
  uint4 w[kOutputs];

  __device__ __forceinline__ void Load(const uint4* rows, int vectors, int i) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      w[o] = i < vectors ? __ldcs(rows + static_cast<int64_t>(o) * vectors + i) : uint4{};
    }
  }
};

template <int kRows>
__device__ __forceinline__ void Add(const Weights& weights, const uint4* x, int vectors, int i,
                                    float (&sum)[kOutputs][kRows]) {
  if (i >= vectors) return;
  float in[kRows][kVector];
#pragma unroll
  for (int r = 0; r < kRows; ++r) Widen(x[static_cast<int64_t>(r) * vectors + i], in[r]);
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    float w[kVector];
    Widen(weights.w[o], w);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[o][r] = fmaf(w[j], in[r][j], sum[o][r]);
    }
  }
}

// A block computes kOutputs columns of y. Its threads take vectors of the inputs in turn and keep
// two in flight.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    ProductKernel(ProjectionShape shape, float scale, const uint4* x, const uint4* w, void* y) {
  const int vectors = shape.inputs / kVector;
  const uint4* rows = w + static_cast<int64_t>(blockIdx.x) * kOutputs * vectors;
  Weights first, second;
  int i = threadIdx.x;
  first.Load(rows, vectors, i);
  second.Load(rows, vectors, i + kThreads);
  WaitForPrevious();
  float sum[kOutputs][kRows] = {};
  for (; i < vectors; i += 2 * kThreads) {
    Add<kRows>(first, x, vectors, i, sum);
    first.Load(rows, vectors, i + 2 * kThreads);
    Add<kRows>(second, x, vectors, i + kThreads, sum);
    second.Load(rows, vectors, i + 3 * kThreads);
  }
  __shared__ float sums[kThreads / 32][kOutputs][kRows];
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      for (int step = 16; step > 0; step /= 2) {
        sum[o][r] += __shfl_xor_sync(~0u, sum[o][r], step);
      }
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][o][r] = sum[o][r];
    }
  }
  __syncthreads();
  if (threadIdx.x >= kOutputs * kRows) return;
  const int o = threadIdx.x % kOutputs, r = threadIdx.x / kOutputs;
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) total += sums[warp][o][r];
  const int64_t at = static_cast<int64_t>(r) * shape.outputs + blockIdx.x * kOutputs + o;
  if (shape.output == ProjectionOutput::kF32) {
    static_cast<float*>(y)[at] = scale * total;
  } else {
    static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16(scale * total);
  }
}

template <int kRows>
cudaError_t Enqueue(const ProjectionShape& shape, float scale, const kernels::Bf16* x,
                    const kernels::Bf16* w, void* y, cudaStream_t stream) {
  return Launch(ProductKernel<kRows>, dim3(shape.outputs / kOutputs), kThreads, stream, shape,
                scale, reinterpret_cast<const uint4*>(x), reinterpret_cast<const uint4*>(w), y);
}

}  // namespace

cudaError_t FewRowsProduct(const ProjectionShape& shape, float scale, const kernels::Bf16* x,
                           const kernels::Bf16* w, void* y, cudaStream_t stream) {
  if (shape.inputs < kVector || shape.inputs % kVector != 0 || shape.outputs < kOutputs ||
      shape.outputs % kOutputs != 0) {
    return cudaErrorInvalidValue;
  }
  switch (shape.rows) {
    case 1:
      return Enqueue<1>(shape, scale, x, w, y, stream);
    case 2:
      return Enqueue<2>(shape, scale, x, w, y, stream);
    case 3:
      return Enqueue<3>(shape, scale, x, w, y, stream);
    case 4:
      return Enqueue<4>(shape, scale, x, w, y, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace crumb::models::cuda
