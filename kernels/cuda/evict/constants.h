// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Rotations and feedback matrices in the order in which EvictWindows reads them. They are permuted
// once, when a model is loaded; afterwards one bulk copy brings a whole matrix to shared memory.
// All pointers are device pointers.
namespace crumb::kernels::cuda {

// Opaque; 128-byte aligned.
struct EvictRotation;
struct EvictFeedback;

// A prepared rotation consists of chunks of 64 inner channels. A chunk holds R as the sum of bf16
// parts: the high part, the low part (R minus the high part) and, for head_dim 256, a third part.
// A part has head_dim columns of 64 elements each, in the 128-byte swizzle that wgmma and
// ldmatrix share.
inline constexpr int kChunkChannels = 64;
constexpr int RotationParts(int head_dim) { return head_dim == 256 ? 3 : 2; }
template <int kDim>
inline constexpr int kRotationParts = RotationParts(kDim);
template <int kDim>
inline constexpr int kPartBytes = kDim * 2 * kChunkChannels;

// A prepared feedback matrix U is cut into blocks of 16 channels. First come, for each block but
// the first, the fp16 MMA fragments of U between each earlier block and this one (512 bytes per
// pair of blocks). Then come, for each block, the constants within it: for each of its two tiles of
// 8 channels, four times 16 bytes for each lane c of 4, which hold the contributions of channel
// pairs 0, 1 and 2 of the tile to pair c (zero up to pair c itself) and of pair c's first channel
// to its second; then the fragments of the first tile's contribution to the second, as high and low
// halves; then the fragments of the block's part of I + U (512 bytes, like those of a pair of
// blocks) and its 16 weights D, floats.
inline constexpr int kFeedbackChannels = 16;
inline constexpr int kFeedbackPairBytes = 512;
inline constexpr int kFeedbackMetricOffset = 768;  // bytes before it in a block's own constants
inline constexpr int kFeedbackWeightsOffset = kFeedbackMetricOffset + kFeedbackPairBytes;
inline constexpr int kFeedbackOwnBytes = kFeedbackWeightsOffset + 4 * kFeedbackChannels;
constexpr int FeedbackPairs(int head_dim) {
  const int blocks = head_dim / kFeedbackChannels;
  return blocks * (blocks - 1) / 2;
}
template <int kDim>
inline constexpr int kFeedbackOwnOffset = FeedbackPairs(kDim) * kFeedbackPairBytes;

// Bytes of one prepared matrix.
constexpr size_t EvictRotationBytes(int head_dim) {
  return static_cast<size_t>(head_dim) * head_dim * 2 * RotationParts(head_dim);
}
constexpr size_t EvictFeedbackBytes(int head_dim) {
  return static_cast<size_t>(FeedbackPairs(head_dim)) * kFeedbackPairBytes +
         static_cast<size_t>(head_dim / kFeedbackChannels) * kFeedbackOwnBytes;
}

// Permutes rotations.
// rotation  [matrices, head_dim, head_dim] R of every (layer, KV head), row-major, y = x R
// prepared  matrices * EvictRotationBytes(head_dim)
cudaError_t PrepareEvictRotation(const float* rotation, int head_dim, int matrices,
                                 EvictRotation* prepared, cudaStream_t stream);

// Permutes feedback matrices.
// feedback  [matrices, head_dim, head_dim] U and D as in RowTransform, row-major; nothing below the
//           diagonal is read
// prepared  matrices * EvictFeedbackBytes(head_dim)
cudaError_t PrepareEvictFeedback(const float* feedback, int head_dim, int matrices,
                                 EvictFeedback* prepared, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
