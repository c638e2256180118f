// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "kernels/cuda/prefill/traits.cuh"

// The kernels of both paths share the query rows of a block and the launch.
namespace crumb::kernels::cuda::prefill {

// Sets token and row of the block's query row `i`.
template <class T>
__device__ __forceinline__ void AssignQueryRow(const PrefillAttentionParams& p,
                                               const Block<T>& block, int i, int* token, int* row) {
  const bool exists = i < block.query_rows;
  const int64_t query_row = block.first_query_row + (exists ? i : 0);
  const int head = block.head * block.heads + static_cast<int>(query_row % block.heads);
  *token = static_cast<int>(query_row / block.heads);
  *row = exists ? (block.begin + *token) * p.shape.q_heads + head : -1;
}

template <class T>
cudaError_t LaunchKernel(void (*kernel)(PrefillAttentionParams), int threads, int bytes,
                         const PrefillAttentionParams& p, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int64_t query_rows =
      static_cast<int64_t>(p.shape.fresh_max) * (p.shape.q_heads / p.shape.kv_heads);
  const dim3 grid(static_cast<unsigned>((query_rows + T::kBlockQueryRows - 1) / T::kBlockQueryRows),
                  static_cast<unsigned>(p.shape.kv_heads), static_cast<unsigned>(p.shape.batch));
  kernel<<<grid, threads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda::prefill
