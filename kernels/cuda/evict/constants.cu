// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict/constants.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace crumb::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Each thread computes all parts of one element.
__global__ void RotationKernel(const float* rotation, int dim, int parts, uint16_t* prepared) {
  const int64_t matrix = blockIdx.y;
  rotation += matrix * dim * dim;
  prepared += matrix * parts * dim * dim;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < dim * dim; i += gridDim.x * kThreads) {
    const int column = i / dim, inner = i % dim;  // position in the MMA's operand B
    const int chunk = inner / kChunkChannels, k = inner % kChunkChannels;
    float left = rotation[inner * dim + column];
    const int at = column * kChunkChannels + 8 * ((k / 8) ^ (column % 8)) + k % 8;
    for (int part = 0; part < parts; ++part) {
      const __nv_bfloat16 rounded = __float2bfloat16_rn(left);
      prepared[(parts * chunk + part) * dim * kChunkChannels + at] = __bfloat16_as_ushort(rounded);
      left -= __bfloat162float(rounded);
    }
  }
}

struct FeedbackLayout {
  int64_t own_offset;
  int64_t bytes;
};

// Returns the half nearest to x within the range of halves.
__device__ __half HalfOf(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

// Stores U of channels k and n that belong to the same block.
__device__ void PlaceOwn(int k, int n, float x, char* own) {
  const int pair = k % 8 / 2, to = n % 8 / 2;
  if (k / 8 == n / 8) {
    float* tile = reinterpret_cast<float*>(own + 256 * (n / 8));
    const int word = 2 * (k % 2) + n % 2;
    if (pair < 3) tile[16 * pair + 4 * to + word] = pair < to ? x : 0.0f;
    // Among the four elements of a channel pair with itself only that from its first to its second
    // channel is not zero.
    if (pair == to) tile[48 + 4 * to + (word ^ 1)] = x;
  } else if (k < n) {
    __half* halves = reinterpret_cast<__half*>(own + 512 + 8 * (4 * (n % 8) + pair));
    const __half high = HalfOf(x);
    halves[k % 2] = high;
    halves[2 + k % 2] = HalfOf(x - __half2float(high));
  }
}

// Stores element (k, n) of a 16 x 16 block as a fragment of the MMA's operand B. Lane 4 r + c holds
// the words (columns 0-7, k 2 c), (columns 0-7, k 2 c + 8), then the same of columns 8-15.
__device__ void PlaceFragment(int k, int n, float x, char* block) {
  const int lane = 4 * (n % 8) + k % 8 / 2, word = 2 * (n / 8) + k / 8;
  reinterpret_cast<__half*>(block)[8 * lane + 2 * word + k % 2] = HalfOf(x);
}

__global__ void FeedbackKernel(const float* feedback, int dim, FeedbackLayout layout,
                               char* prepared) {
  const int64_t matrix = blockIdx.y;
  feedback += matrix * dim * dim;
  prepared += matrix * layout.bytes;
  char* own = prepared + layout.own_offset;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < dim * dim; i += gridDim.x * kThreads) {
    const int from = i / dim, to = i % dim;
    const int block = to / 16, before = from / 16, k = from % 16, n = to % 16;
    const float x = from < to ? feedback[i] : 0.0f;
    if (block == before) {
      char* const constants = own + block * kFeedbackOwnBytes;
      PlaceOwn(k, n, x, constants);
      PlaceFragment(k, n, k == n ? 1.0f : x, constants + kFeedbackMetricOffset);
      if (k == n) reinterpret_cast<float*>(constants + kFeedbackWeightsOffset)[k] = feedback[i];
    } else if (before < block) {
      PlaceFragment(k, n, x, prepared + (block * (block - 1) / 2 + before) * kFeedbackPairBytes);
    }
  }
}

bool Served(int head_dim) { return head_dim == 64 || head_dim == 128 || head_dim == 256; }

}  // namespace

cudaError_t PrepareEvictRotation(const float* rotation, int head_dim, int matrices,
                                 EvictRotation* prepared, cudaStream_t stream) {
  if (!Served(head_dim) || matrices < 1 || matrices > 65535) return cudaErrorInvalidValue;
  const dim3 grid(head_dim * head_dim / kThreads / 4, matrices);
  RotationKernel<<<grid, kThreads, 0, stream>>>(rotation, head_dim, RotationParts(head_dim),
                                                reinterpret_cast<uint16_t*>(prepared));
  return cudaGetLastError();
}

cudaError_t PrepareEvictFeedback(const float* feedback, int head_dim, int matrices,
                                 EvictFeedback* prepared, cudaStream_t stream) {
  if (!Served(head_dim) || matrices < 1 || matrices > 65535) return cudaErrorInvalidValue;
  const dim3 grid(head_dim * head_dim / kThreads / 4, matrices);
  const FeedbackLayout layout = {int64_t{FeedbackPairs(head_dim)} * kFeedbackPairBytes,
                                 static_cast<int64_t>(EvictFeedbackBytes(head_dim))};
  FeedbackKernel<<<grid, kThreads, 0, stream>>>(feedback, head_dim, layout,
                                                reinterpret_cast<char*>(prepared));
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
