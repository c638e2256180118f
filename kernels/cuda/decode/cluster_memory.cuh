// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/cluster_ptx.cuh"
#include "kernels/cuda/decode/cluster_launch.h"
#include "kernels/cuda/decode/merge_splits.cuh"
#include "kernels/cuda/decode/rotate_query.cuh"

// Where a block of a cluster is, and the shared memory of all of its cluster (decode_cluster.h).
// Block `rank` of a cluster owns a slice of the channels: of q', and of the output.
namespace crumb::kernels::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Which share of which pair a block has.
struct ClusterPlace {
  int rank;    // in the cluster
  int blocks;  // of the cluster
  int part;    // of the pair's clusters
  int parts;
  int sequence;
  int head;
  int pair;        // sequence and head as one number
  int first;       // of the pair's clusters, of all
  int slice_log2;  // channels of a block

  // By the grid.
  __device__ __forceinline__ explicit ClusterPlace(const DecodeKernelParams& k)
      : ClusterPlace(k, {k.launch.cluster.parts,
                         static_cast<int>(blockIdx.x) >> k.launch.cluster.blocks_log2,
                         static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y)}) {
    first = pair * parts;
  }
  // By the plan.
  __device__ __forceinline__ ClusterPlace(const DecodeKernelParams& k, const ClusterShare& share)
      : rank(static_cast<int>(blockIdx.x) & ((1 << k.launch.cluster.blocks_log2) - 1)),
        blocks(1 << k.launch.cluster.blocks_log2),
        part(share.part),
        parts(share.parts),
        sequence(share.sequence),
        head(share.head),
        pair(share.sequence * k.p.shape.kv_heads + share.head),
        first((static_cast<int>(blockIdx.x) >> k.launch.cluster.blocks_log2) - share.part),
        slice_log2(k.launch.cluster.slice_log2) {}
  __device__ __forceinline__ int slice() const { return 1 << slice_log2; }
  // Of the pair's blocks.
  __device__ __forceinline__ int index() const { return part * blocks + rank; }
  __device__ __forceinline__ int count() const { return parts * blocks; }
};

// What blocks wait for: each once in a launch.
enum ClusterExchange { kRotatedSlices = 0, kPartialSums = 1, kMergedSlices = 2 };

// This block's shared memory, and how others reach theirs.
template <class T>
struct ClusterMemory {
  static constexpr int kWarps = T::kThreadsMax / 32;
  // Floats from one row of a warp's sums to the next; bank conflicts.
  static constexpr int kSumStride = T::kDim + 8;
  static_assert(4 * T::kRows * kSumStride <= kClusterStages * T::kTileBytes);

  char* shared;
  const ClusterLayout& at;

  __device__ __forceinline__ ClusterMemory(char* base, const DecodeKernelParams& k)
      : shared(base), at(k.launch.cluster.layout) {}
  __device__ __forceinline__ float* Floats(uint32_t offset) const {
    return reinterpret_cast<float*>(shared + offset);
  }
  __device__ __forceinline__ uint32_t Address(uint32_t offset) const {
    return ptx::SharedAddress(shared) + offset;
  }
  __device__ __forceinline__ uint32_t Barrier(ClusterExchange exchange) const {
    return Address(at.barriers) + 8 * (kWarps * kClusterStages + exchange);
  }
  __device__ __forceinline__ uint32_t Slots(int warp) const {
    return Address(warp * kClusterStages * T::kTileBytes);
  }

  __device__ __forceinline__ RotatedQuery Rotated() const {
    return {reinterpret_cast<const uint32_t*>(shared + at.fragment), Floats(at.constant)};
  }

  // One thread, before any block stores anything.
  __device__ __forceinline__ void InitExchanges(int blocks) const {
    const uint32_t bytes[3] = {4u * T::kRows * T::kDim,
                               8u * T::kRows * T::kDim + 16u * T::kRows * blocks,
                               4u * T::kRows * T::kDim};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      ptx::InitBarrier(Barrier(static_cast<ClusterExchange>(i)), 1);
    }
    ptx::FenceBarrierInit();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      ptx::ArriveExpecting(Barrier(static_cast<ClusterExchange>(i)), bytes[i]);
    }
  }
};

#endif

}  // namespace crumb::kernels::cuda
