// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/evict/clip_guess.h"
#include "kernels/cuda/evict/constants.h"
#include "kernels/cuda/evict/evict_call.h"
#include "kernels/cuda/evict/rotate_rows.cuh"
#include "kernels/cuda/evict/tile_checksums.cuh"

// Parameters and shared memory of the evict kernel (kernel.cuh). A block's shared memory holds R or
// a part of it, the feedback matrix, a small state, then each warpgroup's mean and rows, and the
// constants of checksums.
namespace crumb::kernels::cuda {

inline constexpr int kWarpgroupThreads = 32 * kWarpgroupWarps;

struct EvictKernelParams {
  EvictParams p;
  ClipGuess clip[2];        // K, V
  uint32_t zeros_checksum;  // CRC-32C of a tile of zeros
  // blocks that divide each matrix's windows; 1: blocks go from matrix to matrix
  int blocks_per_matrix;
  bool windows_apart;  // whether a block's range may begin between the windows of one round
  bool bulk;  // whether R comes by bulk copies, and is multiplied by wgmma where the kernel has it
  bool streamed;  // whether R does not fit into shared memory and passes part by part
};

// The device properties that the launch configuration depends on.
struct EvictDevice {
  int processors;
  int shared_bytes;  // most shared memory of a block
  bool has_wgmma;
};

using EvictLauncher = cudaError_t (*)(EvictKernelParams, const EvictDevice&, cudaStream_t);

// Returns the launcher of launch.cuh, which is compiled in generated sources.
template <int dim, int group_size>
EvictLauncher EvictInstance(bool feedback);

template <class T, bool kFeedback>
struct EvictLayout {
  // Warpgroups per block: 128 accumulators and more per thread leave registers for few.
  static constexpr int kWarpgroups =
      kFeedback ? (T::kDim == 256 ? 1 : 4) : (T::kDim == 256 ? 2 : 4);
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kRotationBytes = static_cast<int>(EvictRotationBytes(T::kDim));
  static constexpr int kFeedbackBytes =
      kFeedback ? static_cast<int>(EvictFeedbackBytes(T::kDim)) : 0;
  static constexpr int kStateBytes =
      128;  // an mbarrier, MatrixFacts, addresses of the warpgroups' means
  static constexpr int kRowBytes = kWarpRows * kRowPitch<T::kDim>;
  static constexpr int kWarpgroupBytes = kWarpgroupWarps * kRowBytes + kMeanBytes<T::kDim>;

  static constexpr int Bytes(bool streamed, int warpgroups, bool checksums) {
    return (streamed ? kPartBytes<T::kDim> : kRotationBytes) + kFeedbackBytes + kStateBytes +
           warpgroups * kWarpgroupBytes +
           (checksums ? static_cast<int>(sizeof(MatrixChecksums<T>)) : 0);
  }
};

// Values derived from the block's matrix. They lie in shared memory because registers are scarce.
struct MatrixFacts {
  int64_t ring_offset;  // offset of its rows in a window's ring
  int64_t tile_offset;
  const float* mean;  // [position_blocks, head_dim] or null
};

// The instructions that multiply rows by R. kWgmma needs the whole R in shared memory, and both K
// and V rotated.
enum class RotateMma { kWarp, kWgmma };

}  // namespace crumb::kernels::cuda
