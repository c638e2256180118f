// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/pages.h"

namespace crumb::kernels::cuda {
namespace {

constexpr int kThreads = 128;

// Returns the address of the K (or V) row of new token `token`, or 0 if the row is not to be
// written.
__device__ __forceinline__ uint64_t RowAddress(const AppendParams& p, int sequence, int token,
                                               int head, bool value) {
  const int count = p.new_tokens != nullptr ? p.new_tokens[sequence] : p.q_tokens;
  const int sink = p.lengths.sink_tokens[sequence];
  const int recent = p.lengths.recent_tokens[sequence];
  const int begin = p.lengths.recent_begin[sequence];
  const bool padding = sink + recent + p.lengths.pages[sequence] == 0;
  if (padding || token >= count) return 0;
  int slot = recent - count + token;
  const bool in_ring = slot >= 0;
  slot = in_ring ? (begin + slot) % p.recent_capacity : sink + slot;
  if (slot < 0) return 0;
  const Bf16Rows& rows = in_ring ? p.recent : p.sink;
  return rows.address[sequence] + rows.layer_offset + head * rows.head_stride +
         slot * rows.token_stride + (value ? rows.v_offset : 0);
}

// Each thread moves 16 bytes of a row.
__global__ void __launch_bounds__(kThreads) AppendKernel(const __grid_constant__ AppendParams p) {
  const int pieces = p.head_dim / 8;
  int i = blockIdx.x * kThreads + threadIdx.x;
  const int piece = i % pieces;
  i /= pieces;
  const int head = i % p.kv_heads;
  i /= p.kv_heads;
  const int token = i % p.q_tokens;
  i /= p.q_tokens;
  const int sequence = i / 2;
  const bool value = i % 2 == 1;
  if (sequence >= p.batch) return;
  const int64_t from =
      sequence * p.sequence_stride + token * p.token_stride + head * p.head_stride + 8 * piece;
  // The row is requested before the lengths are known, so that both latencies overlap.
  const uint4 x =
      *reinterpret_cast<const uint4*>(static_cast<const Bf16*>(value ? p.v : p.k) + from);
  const uint64_t row = RowAddress(p, sequence, token, head, value);
  if (row == 0) return;
  *reinterpret_cast<uint4*>(row + 16 * piece) = x;
}

}  // namespace

cudaError_t AppendRows(const AppendParams& p, cudaStream_t stream) {
  if (p.batch < 1 || p.q_tokens < 1 || p.q_tokens > kAppendTokensMax || p.kv_heads < 1 ||
      p.head_dim < 8 || p.head_dim % 8 != 0 || p.recent_capacity < 1) {
    return cudaErrorInvalidValue;
  }
  const int threads = p.batch * 2 * p.q_tokens * p.kv_heads * (p.head_dim / 8);
  AppendKernel<<<(threads + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
