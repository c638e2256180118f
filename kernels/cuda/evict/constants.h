// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Rotations and feedback in the form in which EvictWindows reads them: made once when a model is
// loaded, one bulk copy each afterwards. All pointers are device pointers.
namespace crumb::kernels::cuda {

// Opaque; 128-byte aligned.
struct EvictRotation;
struct EvictFeedback;

// R in parts: chunks of 64 inner channels, of each the high part, then the low one, what 16 bits
// leave of R, and for head_dim 256 what these leave; a part has head_dim columns of 64 16-bit
// elements each, in the 128-byte swizzle of Hopper's tensor cores.
inline constexpr int kChunkChannels = 64;
constexpr int RotationParts(int head_dim) { return head_dim == 256 ? 3 : 2; }
template <int kDim>
inline constexpr int kRotationParts = RotationParts(kDim);
template <int kDim>
inline constexpr int kPartBytes = kDim * 2 * kChunkChannels;

// U in blocks of 16 channels: for each block but the first, the products' fragments of all blocks
// before it (fp16, 512 bytes a pair); then for each block what it needs itself. That is for each of
// its tiles of 8 channels four times 16 bytes a lane c of 4: what pair 0, 1 and 2 of the tile's
// channels add to pair c, zero up to c itself, and what its first channel adds to its second; then
// the fragments of the first tile's share in the second, high and low halves.
inline constexpr int kFeedbackChannels = 16;
inline constexpr int kFeedbackPairBytes = 512;
inline constexpr int kFeedbackOwnBytes = 768;
constexpr int FeedbackPairs(int head_dim) {
  const int blocks = head_dim / kFeedbackChannels;
  return blocks * (blocks - 1) / 2;
}
template <int kDim>
inline constexpr int kFeedbackOwnOffset = FeedbackPairs(kDim) * kFeedbackPairBytes;

// Bytes of one matrix.
constexpr size_t EvictRotationBytes(int head_dim) {
  return static_cast<size_t>(head_dim) * head_dim * 2 * RotationParts(head_dim);
}
constexpr size_t EvictFeedbackBytes(int head_dim) {
  return static_cast<size_t>(FeedbackPairs(head_dim)) * kFeedbackPairBytes +
         static_cast<size_t>(head_dim / kFeedbackChannels) * kFeedbackOwnBytes;
}

// rotation  [matrices, head_dim, head_dim] R of every (layer, KV head), row-major, y = x R
// prepared  matrices * EvictRotationBytes(head_dim)
cudaError_t PrepareEvictRotation(const float* rotation, int head_dim, int matrices,
                                 EvictRotation* prepared, cudaStream_t stream);

// feedback  [matrices, head_dim, head_dim] U, row-major; only what lies above the diagonal is read
// prepared  matrices * EvictFeedbackBytes(head_dim)
cudaError_t PrepareEvictFeedback(const float* feedback, int head_dim, int matrices,
                                 EvictFeedback* prepared, cudaStream_t stream);

}  // namespace crumb::kernels::cuda
