// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/plan.h"

// Where lengths decide between both forms: how many clusters each pair gets, and whether clusters
// attend at all. All costs in pages of a block's time.
namespace crumb::kernels::cuda {

struct ClusterPlan {
  ClusterShare* shares;  // [clusters], or null: the shape has no clusters
  int clusters;
  int blocks;    // of a cluster
  int overhead;  // of the other form, more than that of clusters
};

// More clusters than one for a pair: the merge of its parts.
inline constexpr int kPartsOverhead = 8;

__device__ __forceinline__ int CeilDiv(int x, int y) { return (x + y - 1) / y; }

// The smallest cost of a cluster with which `clusters` are enough for all sequences of a head. By a
// warp; `largest` is the cost of the largest sequence.
__device__ __forceinline__ int LeastClusterCost(const int32_t* costs, int batch, int clusters,
                                                int largest) {
  int low = 0, high = largest;  // too little, enough
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    int needed = 0;
    for (int s = threadIdx.x; s < batch; s += 32) needed += CeilDiv(costs[s], middle);
    if (static_cast<int>(__reduce_add_sync(~0u, needed)) <= clusters) {
      high = middle;
    } else {
      low = middle;
    }
  }
  return high;
}

// Writes what each cluster does; whether clusters attend. By the block's first warp. `costs`:
// [batch] of one KV head, 0 where a sequence is padding; their sum times kv_heads fits an int.
__device__ inline bool PlanClusters(const ClusterPlan& plan, const int32_t* costs, int batch,
                                    int kv_heads) {
  int total = 0, largest = 0, present = 0;
  for (int s = threadIdx.x; s < batch; s += 32) {
    total += costs[s];
    largest = max(largest, costs[s]);
    present += costs[s] > 0;
  }
  total = __reduce_add_sync(~0u, total);
  largest = __reduce_max_sync(~0u, largest);
  present = __reduce_add_sync(~0u, present);
  const int clusters = plan.clusters / kv_heads;  // of a head
  bool taken = present > 0 && present <= clusters;
  int cost = 1;
  if (taken) {
    cost = LeastClusterCost(costs, batch, clusters, largest);
    const int time = CeilDiv(cost, plan.blocks) + (cost < largest ? kPartsOverhead : 0);
    taken = time <= total * kv_heads / (plan.clusters * plan.blocks) + plan.overhead;
  }
  for (int i = threadIdx.x; i < plan.clusters; i += 32) {
    plan.shares[i] = {taken ? 0 : kNoClusters, 0, 0, 0};
  }
  __syncwarp();
  if (!taken) return false;
  int before = 0;  // of the head's clusters
  for (int base = 0; base < batch; base += 32) {
    const int sequence = base + static_cast<int>(threadIdx.x);
    const int parts = sequence < batch ? CeilDiv(costs[sequence], cost) : 0;
    int end = parts;
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, end, step);
      if (static_cast<int>(threadIdx.x) >= step) end += x;
    }
    for (int i = 0; i < parts * kv_heads; ++i) {
      const int head = i / parts, part = i % parts;
      plan.shares[head * clusters + before + end - parts + part] = {parts, part, sequence, head};
    }
    before += __shfl_sync(~0u, end, 31);
  }
  return true;
}

}  // namespace crumb::kernels::cuda
