// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/cluster_ptx.cuh"
#include "kernels/cuda/decode/kernels.h"
#include "kernels/cuda/decode/merge_splits.cuh"
#include "kernels/cuda/decode/rotate_query.cuh"

// A block's place in its cluster, and the cluster's shared memory. Block `rank` of a cluster owns a
// slice of the channels, of q' and of the output.
namespace crumb::kernels::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The problem and the part of it that a block processes.
struct ClusterPlace {
  int rank;    // the block's rank in its cluster
  int blocks;  // blocks of the cluster
  int part;    // index of the cluster among the problem's clusters
  int parts;
  int sequence;
  int head;
  int problem;     // head and sequence as one index
  int first;       // index, among all clusters, of the problem's first cluster
  int slice_log2;  // channels per block

  // Constructs the place that the grid gives to this block.
  __device__ __forceinline__ explicit ClusterPlace(const DecodeKernelParams& k)
      : ClusterPlace(k, {k.launch.cluster.parts,
                         static_cast<int>(blockIdx.x) >> k.launch.cluster.blocks_log2,
                         static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y)}) {
    first = problem * parts;
  }
  // Constructs the place that the plan gives to this block.
  __device__ __forceinline__ ClusterPlace(const DecodeKernelParams& k, const ClusterWork& work)
      : rank(static_cast<int>(blockIdx.x) & ((1 << k.launch.cluster.blocks_log2) - 1)),
        blocks(1 << k.launch.cluster.blocks_log2),
        part(work.part),
        parts(work.parts),
        sequence(work.sequence),
        head(work.head),
        problem(work.sequence * k.p.shape.kv_heads + work.head),
        first((static_cast<int>(blockIdx.x) >> k.launch.cluster.blocks_log2) - work.part),
        slice_log2(k.launch.cluster.slice_log2) {}
  __device__ __forceinline__ int slice() const { return 1 << slice_log2; }
  // Index of the block, and number of blocks, among all blocks of the problem.
  __device__ __forceinline__ int index() const { return part * blocks + rank; }
  __device__ __forceinline__ int count() const { return parts * blocks; }
};

// The exchanges between the blocks of a cluster. Each happens once per launch.
enum ClusterExchange { kRotatedSlices = 0, kPartialSums = 1, kMergedSlices = 2 };

// This block's shared memory, and addresses of the other blocks'.
template <class T>
struct ClusterMemory {
  static constexpr int kWarps = T::kThreadsMax / 32;
  // Floats from one row of a warp's sums to the next, padded against bank conflicts.
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

  // Initialises the barriers of the exchanges. REQUIRES: one thread calls it, before any block
  // stores to another.
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
