// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/blocks/blocks.h"

#include "kernels/cuda/blocks/plan_request.h"
#include "kernels/cuda/blocks/row_copies.h"

namespace crumb::kernels::cuda {
namespace {

constexpr int kPlanThreads = 512;
constexpr int kPageThreads = 256;
constexpr int kMoveThreads = 256;
// Rows that a thread moves, so that several loads are in flight.
constexpr int kRowsAtOnce = 4;

// One block plans all requests.
__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ PlanBlocksParams p) {
  __shared__ int windows;
  if (threadIdx.x == 0) windows = 0;
  for (int e = threadIdx.x; e < p.decode_entries + p.groups; e += kPlanThreads) {
    ClearEntry(p.tables, e);
  }
  bool mine_in_order = true;
  for (int r = threadIdx.x; r < p.requests; r += kPlanThreads) mine_in_order &= TokensInOrder(p, r);
  const bool in_order = __syncthreads_and(mine_in_order) != 0;
  for (int r = threadIdx.x; r < p.requests; r += kPlanThreads) {
    PlanRequest(p, r, in_order, [] { return atomicAdd(&windows, 1); });
  }
  __syncthreads();
  if (threadIdx.x == 0) *p.tables.windows = windows;
}

__global__ void __launch_bounds__(kPageThreads)
    PagesKernel(const __grid_constant__ PlanBlocksParams p) {
  const int e = blockIdx.x;
  const int page = blockIdx.y * kPageThreads + threadIdx.x;
  if (page < p.tables.pages[e]) WritePage(p, e, page);
}

// A thread moves a 16-byte piece of kRowsAtOnce rows.
__global__ void __launch_bounds__(kMoveThreads)
    MoveKernel(const __grid_constant__ MoveBlockRowsParams p) {
  const int r = blockIdx.z, head = blockIdx.y;
  const BlockRequest request = p.request[r];
  if (request.state == kBlockFailed && p.move == BlockMove::kGather && blockIdx.x == 0 &&
      head == 0) {
    for (int t = 0; t < request.tokens; ++t) {
      for (int64_t i = threadIdx.x; i < p.out_elements; i += kMoveThreads) {
        p.out[(request.first + t) * p.out_stride + i] = Bf16{0x7fc0};  // NaN
      }
    }
  }
  if (request.state != kBlockLive) return;
  const int pieces = p.head_dim / 8;
  const int piece = threadIdx.x % pieces;
  const bool value = threadIdx.x / pieces % 2 == 1;
  const int rows = kMoveThreads / (2 * pieces);  // rows per round of the block
  const int first = blockIdx.x * rows * kRowsAtOnce + threadIdx.x / (2 * pieces);
  uint4 x[kRowsAtOnce];
  uint4* to[kRowsAtOnce];
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const BlockRowCopy copy = RowCopy(p, request, r, first + i * rows, head, value);
    to[i] = nullptr;
    if (copy.from == nullptr) continue;
    x[i] = reinterpret_cast<const uint4*>(copy.from)[piece];
    to[i] = reinterpret_cast<uint4*>(copy.to) + piece;
  }
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    if (to[i] != nullptr) *to[i] = x[i];
  }
}

}  // namespace

cudaError_t PlanBlocks(const PlanBlocksParams& p, cudaStream_t stream) {
  const int entries = p.decode_entries + p.groups;
  if (p.requests < 1 || entries < 1 || p.pages_max < 1) return cudaErrorInvalidValue;
  PlanKernel<<<1, kPlanThreads, 0, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const dim3 grid(entries, (p.pages_max + kPageThreads - 1) / kPageThreads);
  PagesKernel<<<grid, kPageThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t MoveBlockRows(const MoveBlockRowsParams& p, cudaStream_t stream) {
  const bool dim = p.head_dim == 64 || p.head_dim == 128 || p.head_dim == 256;
  if (p.requests < 1 || p.requests > 65535 || p.request_tokens_max < 1 || p.kv_heads < 1 ||
      p.kv_heads > 65535 || !dim) {
    return cudaErrorInvalidValue;
  }
  const int rows = kMoveThreads / (p.head_dim / 4) * kRowsAtOnce;
  const dim3 grid((RowCopies(p) + rows - 1) / rows, p.kv_heads, p.requests);
  MoveKernel<<<grid, kMoveThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
