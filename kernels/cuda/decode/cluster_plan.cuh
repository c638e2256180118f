// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/plan.h"

// The choice between both schedules by the lengths of a batch: how many clusters each problem gets,
// and whether clusters are used at all. All costs are in pages of a block's time.
namespace crumb::kernels::cuda {

struct ClusterPlan {
  ClusterWork* work;  // [clusters], or null: the shape has no clusters
  int clusters;
  int blocks;            // blocks per cluster
  int planned_overhead;  // fixed cost of the planned schedule in excess of clusters
};

// Cost of merging the partial results when a problem is divided over several clusters, in pages.
inline constexpr int kMergeCostPages = 8;

__device__ __forceinline__ int CeilDiv(int x, int y) { return (x + y - 1) / y; }

// Returns the smallest cost per cluster with which `clusters` clusters suffice for all sequences of
// a KV head, by bisection. `largest` is the cost of the largest sequence. One warp calls it.
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

// Writes the work of each cluster and returns whether clusters are used. The block's first warp
// calls it. `costs` [batch] are of one KV head, 0 for padding. REQUIRES: their sum times kv_heads
// fits an int.
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
  const int clusters = plan.clusters / kv_heads;  // clusters of a KV head
  bool taken = present > 0 && present <= clusters;
  int cost = 1;
  if (taken) {
    cost = LeastClusterCost(costs, batch, clusters, largest);
    const int time = CeilDiv(cost, plan.blocks) + (cost < largest ? kMergeCostPages : 0);
    taken = time <= total * kv_heads / (plan.clusters * plan.blocks) + plan.planned_overhead;
  }
  for (int i = threadIdx.x; i < plan.clusters; i += 32) {
    plan.work[i] = {taken ? 0 : kNoClusters, 0, 0, 0};
  }
  __syncwarp();
  if (!taken) return false;
  int before = 0;  // clusters of the head that earlier sequences have
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
      plan.work[head * clusters + before + end - parts + part] = {parts, part, sequence, head};
    }
    before += __shfl_sync(~0u, end, 31);
  }
  return true;
}

}  // namespace crumb::kernels::cuda
