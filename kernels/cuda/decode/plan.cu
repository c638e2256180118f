// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/plan.h"

#include <algorithm>

#include "kernels/cuda/common/window_tokens.cuh"
#include "kernels/cuda/decode/cluster_launch.h"
#include "kernels/cuda/decode/cluster_plan.cuh"

namespace crumb::kernels::cuda {
namespace {

constexpr int kPlanThreads = 512;
constexpr size_t kPlanSharedMax = 40 << 10;  // what a kernel has without asking

// What a segment costs beside its bytes, in pages of the time of one of a block's `groups`: the
// query, the sum over warps, the merge. Of several groups the others go on meanwhile.
__device__ int Int2Overhead(int groups) { return groups == 1 ? 24 : groups == 2 ? 12 : 10; }
__device__ int Bf16Overhead(int groups) { return groups == 1 ? 16 : groups == 2 ? 8 : 7; }
// What all of this form's time outside its tile loop is more than that of clusters, with up to 8
// columns; with more, a page takes longer.
constexpr int kPlannedOverhead = 195;
// From so many (sequence, KV head) pairs for each block on, blocks are cut into groups.
constexpr int kGroupPairsMin = 1;

// What a sequence costs one KV head. A page moves about as many bytes as 8 BF16 tokens, so a page
// costs 1 and a chunk of 16 tokens costs 2.
struct SequenceCost {
  int first_page;
  int pages;   // attended pages
  int chunks;  // BF16 chunks
  int int2_overhead;
  int bf16_overhead;
  __device__ int int2() const { return pages > 0 ? int2_overhead + pages : 0; }
  __device__ int bf16() const { return chunks > 0 ? bf16_overhead + 2 * chunks : 0; }
  __device__ int cost() const { return int2() + bf16(); }
};

struct PlanArguments {
  DecodeLengths lengths;
  PlanView plan;
  ClusterPlan clusters;
  int batch;
  int kv_heads;
  int q_tokens;
  int page_tokens;
  int window;
  int blocks;
  int groups_max;
  int segments_max;
  bool batch_invariant;
  bool shared_lines;
};

// What is known once the batch has been looked at, and the lines that positions are looked up in:
// in shared memory where they have room.
struct PlanState {
  int32_t* boundary;        // [groups + 1] position where a share begins
  int32_t* cost_before;     // [batch + 1] cost of earlier sequences, one head
  int32_t* segment_before;  // [batch + 1] segments, or items, of earlier sequences, one head
  int groups;               // per block
  int active;               // groups that have work
  int head_cost;
  int head_segments;
};

__device__ SequenceCost CostOf(const PlanArguments& a, int sequence, int groups) {
  const int sink = a.lengths.sink_tokens[sequence];
  const int pages = a.lengths.pages[sequence];
  const int recent = WindowTokens(a.lengths, sequence);
  SequenceCost cost;
  cost.int2_overhead = Int2Overhead(groups);
  cost.bf16_overhead = Bf16Overhead(groups);
  cost.first_page = 0;
  if (a.window > 0) {
    const int total = sink + pages * a.page_tokens + recent;
    const int oldest = total - a.q_tokens - a.window + 1;  // of the first query token
    cost.first_page = min(max(oldest - sink, 0) / a.page_tokens, pages);
  }
  cost.pages = pages - cost.first_page;
  cost.chunks =
      (sink + kChunkTokens - 1) / kChunkTokens + (recent + kChunkTokens - 1) / kChunkTokens;
  return cost;
}

__device__ int SplitsOf(const PlanArguments& a, const SequenceCost& cost) {
  const int int2 = a.batch_invariant
                       ? (cost.pages + kInvariantSplitPages - 1) / kInvariantSplitPages
                       : min(cost.pages, 1);
  return int2 + min(cost.chunks, 1);
}

// The last index i of `count` ascending values with value[i] <= x; value[0] <= x.
__device__ int LastNotAbove(const int32_t* value, int count, int x) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (value[middle] <= x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Exclusive sums over the block of two values a thread.
__device__ int2 ScanBlock(int2 mine, int2* total) {
  __shared__ int2 warp_sum[kPlanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
    if (lane >= step) sum = make_int2(sum.x + x, sum.y + y);
  }
  if (lane == 31) warp_sum[warp] = sum;
  __syncthreads();
  int2 before = make_int2(sum.x - mine.x, sum.y - mine.y);
  *total = make_int2(0, 0);
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) before = make_int2(before.x + warp_sum[w].x, before.y + warp_sum[w].y);
    *total = make_int2(total->x + warp_sum[w].x, total->y + warp_sum[w].y);
  }
  return before;
}

// Where group `index` begins: an equal share of the cost, moved down to a place where a cut is
// allowed.
__device__ int BoundaryOf(const PlanArguments& a, const PlanState& state, int index) {
  const int head_cost = state.head_cost;
  const int raw =
      static_cast<int>(static_cast<int64_t>(index) * a.kv_heads * head_cost / state.active);
  const int head = raw / head_cost, rest = raw % head_cost;
  const int sequence = LastNotAbove(state.cost_before, a.batch, rest);
  const SequenceCost cost = CostOf(a, sequence, state.groups);
  int at = rest - state.cost_before[sequence];
  if (at < cost.int2()) {
    int pages = max(0, at - cost.int2_overhead);
    if (a.batch_invariant) pages -= pages % kInvariantSplitPages;
    at = pages == 0 ? 0 : cost.int2_overhead + pages;
  } else {
    const int chunks = a.batch_invariant ? 0 : max(0, at - cost.int2() - cost.bf16_overhead) / 2;
    at = cost.int2() + (chunks == 0 ? 0 : cost.bf16_overhead + 2 * chunks);
  }
  return head * head_cost + state.cost_before[sequence] + at;
}

// Where the share of group `index` is kept.
__device__ GroupShare& ShareOf(const PlanArguments& a, const PlanState& state, int index) {
  return a.plan.shares[index / state.groups * a.groups_max + index % state.groups];
}

// Writes the segments of one item: `count` pieces of [from, to) on the cost line. `first` is the
// index of its first segment.
__device__ void WriteSegments(const PlanArguments& a, const PlanState& state, Segment segment,
                              int overhead, int from, int to, int first, int count,
                              int first_group) {
  const bool int2 = segment.kind == kSegmentInt2;
  const int unit_cost = int2 ? 1 : 2;
  const int first_unit = segment.begin;
  const auto unit_at = [&](int position) {
    return first_unit + max(0, position - from - overhead) / unit_cost;
  };
  for (int i = 0; i < count; ++i) {
    int begin = from, end = to;
    if (!a.batch_invariant) {
      begin = max(from, state.boundary[first_group + i]);
      end = min(to, state.boundary[first_group + i + 1]);
    } else if (int2) {
      begin = i == 0 ? from : from + overhead + i * kInvariantSplitPages;
      end = min(to, from + overhead + (i + 1) * kInvariantSplitPages);
    }
    segment.begin = unit_at(begin);
    segment.end = unit_at(end);
    a.plan.segments[first + i] = segment;
    const int group =
        a.batch_invariant ? LastNotAbove(state.boundary, state.active, begin) : first_group + i;
    if (begin == state.boundary[group]) {
      ShareOf(a, state, group).first = segment;
      ShareOf(a, state, group).begin = first + i;
    }
    if (end == state.boundary[group + 1]) ShareOf(a, state, group).end = first + i + 1;
  }
}

// Both items (history, windows) of one pair.
__device__ void WritePair(const PlanArguments& a, const PlanState& state, int head, int sequence) {
  const SequenceCost cost = CostOf(a, sequence, state.groups);
  if (cost.cost() == 0) return;
  const int from = head * state.head_cost + state.cost_before[sequence];
  const int middle = from + cost.int2(), to = from + cost.cost();
  const int base = head * state.head_segments + state.segment_before[sequence];
  // The index of a segment is the number of items before its own plus, where groups cut items, the
  // number of its group: it grows from segment to segment, whatever is cut where.
  int first[2] = {base, base}, count[2] = {0, 0}, group[2] = {0, 0};
  const int bounds[3] = {from, middle, to};
  for (int kind = 0; kind < 2; ++kind) {
    if (bounds[kind] == bounds[kind + 1]) continue;
    if (a.batch_invariant) {
      count[kind] =
          kind == kSegmentInt2 ? (cost.pages + kInvariantSplitPages - 1) / kInvariantSplitPages : 1;
      first[kind] = base + (kind == kSegmentInt2 ? 0 : count[0]);
    } else {
      group[kind] = LastNotAbove(state.boundary, state.active, bounds[kind]);
      count[kind] =
          LastNotAbove(state.boundary, state.active, bounds[kind + 1] - 1) - group[kind] + 1;
      first[kind] = base + (kind == kSegmentBf16 && cost.pages > 0) + group[kind];
    }
  }
  Segment segment = {};
  segment.sequence = sequence;
  segment.head = head;
  segment.pair = head * a.batch + sequence;
  segment.int2_first = first[0];
  segment.int2_count = count[0];
  segment.bf16_first = first[1];
  segment.bf16_count = count[1];
  for (int kind = 0; kind < 2; ++kind) {
    segment.kind = kind;
    segment.begin = kind == kSegmentInt2 ? cost.first_page : 0;
    WriteSegments(a, state, segment, kind == kSegmentInt2 ? cost.int2_overhead : cost.bf16_overhead,
                  bounds[kind], bounds[kind + 1], first[kind], count[kind], group[kind]);
  }
}

// What all groups of a block are told alike: which segments the block has.
__device__ void CompleteShares(const PlanArguments& a, const PlanState& state, int block) {
  GroupShare* shares = a.plan.shares + block * a.groups_max;
  int begin = 0, end = 0, head = 0;
  for (int g = 0; g < state.groups; ++g) {
    if (shares[g].begin == shares[g].end) continue;
    if (begin == end) begin = shares[g].begin, head = shares[g].first.head;
    end = shares[g].end;
  }
  for (int g = 0; g < a.groups_max; ++g) {
    if (g >= state.groups) shares[g] = shares[0];
    shares[g].block_begin = begin;
    shares[g].block_end = end;
    shares[g].block_head = head;
    shares[g].groups = state.groups;
  }
}

// Whether clusters attend: then there is nothing more to plan.
__device__ bool ClustersAttend(const PlanArguments& a) {
  __shared__ int32_t costs[kPlanThreads];
  if (a.clusters.shares == nullptr) return false;
  const int sequence = static_cast<int>(threadIdx.x);
  if (sequence < a.batch) {
    const SequenceCost cost = CostOf(a, sequence, 1);
    costs[sequence] = cost.pages + 2 * cost.chunks;
  }
  __syncthreads();
  return __syncthreads_or(sequence < 32 && PlanClusters(a.clusters, costs, a.batch, a.kv_heads));
}

__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ PlanArguments a) {
  if (ClustersAttend(a)) return;
  const int per_thread = (a.batch + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(a.batch, static_cast<int>(threadIdx.x) * per_thread);
  const int end = min(a.batch, begin + per_thread);
  extern __shared__ int32_t lines[];
  PlanState state;
  state.boundary = a.plan.boundary;
  state.cost_before = a.plan.cost_before;
  state.segment_before = a.plan.segment_before;
  if (a.shared_lines) {
    state.boundary = lines;
    state.cost_before = state.boundary + a.blocks * a.groups_max + 1;
    state.segment_before = state.cost_before + a.batch + 1;
  }
  state.groups = 1;
  int2 mine, total, before;
  for (;;) {
    mine = make_int2(0, 0);
    for (int s = begin; s < end; ++s) {
      const SequenceCost cost = CostOf(a, s, state.groups);
      mine = make_int2(mine.x + cost.cost(), mine.y + SplitsOf(a, cost));
    }
    before = ScanBlock(mine, &total);
    const bool many = total.y * a.kv_heads >= 2 * kGroupPairsMin * a.blocks;
    if (state.groups == a.groups_max || a.batch_invariant || !many) break;
    state.groups = a.groups_max;  // costs differ then: count again
    __syncthreads();
  }
  for (int s = begin; s < end; ++s) {
    const SequenceCost cost = CostOf(a, s, state.groups);
    state.cost_before[s] = before.x;
    state.segment_before[s] = before.y;
    before = make_int2(before.x + cost.cost(), before.y + SplitsOf(a, cost));
  }
  __syncthreads();

  const int all = total.x * a.kv_heads, groups = a.blocks * state.groups;
  state.head_cost = total.x;
  state.head_segments = total.y;
  state.active = max(1, min(groups, all / kUnitsPerBlockMin));
  for (int i = threadIdx.x; i <= groups; i += kPlanThreads) {
    state.boundary[i] = i < state.active && all > 0 ? BoundaryOf(a, state, i) : all;
    if (i < groups) ShareOf(a, state, i).begin = ShareOf(a, state, i).end = 0;
  }
  // Indices between the segments of two groups of a block may stay without one.
  for (int i = threadIdx.x; i < a.segments_max; i += kPlanThreads) {
    a.plan.segments[i].kind = kSegmentNone;
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < a.batch * a.kv_heads; pair += kPlanThreads) {
    WritePair(a, state, pair / a.batch, pair % a.batch);
  }
  __syncthreads();
  for (int block = threadIdx.x; block < a.blocks; block += kPlanThreads) {
    CompleteShares(a, state, block);
  }
}

// Takes the next part of a buffer: `count` elements at a 256-byte boundary.
template <typename T>
size_t Take(void* base, size_t offset, size_t count, T** part) {
  *part = base == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<char*>(base) + offset);
  return (offset + count * sizeof(T) + 255) / 256 * 256;
}

}  // namespace

cudaError_t LaunchOf(const DecodeShape& shape, DecodeForm form, const DeviceLimits& limits,
                     DecodeLaunch* launch) {
  if (!DecodeSupported(shape)) return cudaErrorInvalidValue;
  const int dim = shape.tile.head_dim;
  launch->columns = LaunchColumnsFor(shape.tile, shape.columns());
  const int columns = launch->columns;
  launch->pair = columns <= 4 || (columns > 8 && columns <= 12);
  launch->column_tiles = columns <= 8 ? 1 : 2;
  launch->blocks = limits.processors;
  launch->slot_bytes = shape.tile.int2_bytes();
  launch->warps = WarpsFor(dim, launch->column_tiles);
  for (; launch->warps >= 4; launch->warps -= 4) {
    const size_t fixed = kPassRows * (dim + 4) * sizeof(float);
    const size_t per_stage = launch->warps * (launch->slot_bytes + 8);
    if (fixed + 2 * per_stage > static_cast<size_t>(limits.shared_bytes)) continue;
    launch->stages =
        static_cast<int>(std::min<size_t>(kStagesMax, (limits.shared_bytes - fixed) / per_stage));
    launch->shared_bytes = launch->stages * per_stage + fixed;
    return ChooseClusters(shape, form, limits, launch);
  }
  return cudaErrorInvalidValue;
}

int SegmentsMax(const DecodeShape& shape, const DecodeLaunch& launch) {
  const int pairs = shape.batch * shape.kv_heads;
  if (!shape.batch_invariant) return 2 * pairs + launch.blocks * launch.groups_max();
  return pairs * ((shape.max_pages + kInvariantSplitPages - 1) / kInvariantSplitPages + 1);
}

size_t LayOutPlan(const DecodeShape& shape, const DecodeLaunch& launch, void* base,
                  PlanView* view) {
  size_t at = 0;
  const size_t groups = static_cast<size_t>(launch.blocks) * launch.groups_max();
  at = Take(base, at, groups, &view->shares);
  at = Take(base, at, groups + 1, &view->boundary);
  at = Take(base, at, shape.batch + 1, &view->cost_before);
  at = Take(base, at, shape.batch + 1, &view->segment_before);
  view->clusters = nullptr;
  if (launch.cluster.by_plan) {
    at = Take(base, at, launch.blocks / launch.cluster.blocks(), &view->clusters);
  }
  return Take(base, at, SegmentsMax(shape, launch), &view->segments);
}

size_t LayOutWorkspace(const DecodeShape& shape, const DecodeLaunch& launch, void* base,
                       WorkspaceView* view) {
  const size_t segments = SegmentsMax(shape, launch);
  const size_t dim = shape.tile.head_dim, rows = launch.rows();
  size_t at = 0;
  if (launch.cluster.taken()) {
    const size_t pairs = static_cast<size_t>(shape.batch) * shape.kv_heads;
    const size_t parts = pairs * launch.cluster.parts;
    *view = {};
    at = Take(base, at, pairs * launch.cluster.blocks(), &view->arrivals);
    return Take(base, at, parts * rows * dim / 2, &view->packets);
  }
  view->packets = nullptr;
  // Of a cluster each block counts.
  const size_t counters = launch.cluster.by_plan ? launch.cluster.blocks() : 1;
  at = Take(base, at, counters * shape.batch * shape.kv_heads, &view->arrivals);
  at = Take(base, at, segments * launch.FragmentWords(shape.tile), &view->q_fragment);
  at = Take(base, at, segments * rows * (1 + shape.tile.groups()), &view->row_constant);
  at = Take(base, at, segments * rows * 2, &view->row_state);
  at = Take(base, at, segments * rows * dim, &view->partial);
  if (!launch.cluster.by_plan) return at;
  const size_t clusters = launch.blocks / launch.cluster.blocks();
  return Take(base, at, clusters * rows * dim / 2, &view->packets);
}

size_t DecodePlanBytes(const DecodeShape& shape, const DecodeTuning& tuning) {
  DeviceLimits limits = tuning.limits;
  DecodeLaunch launch;
  PlanView view;
  if (CompleteLimits(&limits) != cudaSuccess) return 0;
  if (LaunchOf(shape, tuning.form, limits, &launch) != cudaSuccess) return 0;
  return LayOutPlan(shape, launch, nullptr, &view);
}

size_t DecodeWorkspaceBytes(const DecodeShape& shape, const DecodeTuning& tuning) {
  DeviceLimits limits = tuning.limits;
  DecodeLaunch launch;
  WorkspaceView view;
  if (CompleteLimits(&limits) != cudaSuccess) return 0;
  if (LaunchOf(shape, tuning.form, limits, &launch) != cudaSuccess) return 0;
  return LayOutWorkspace(shape, launch, nullptr, &view);
}

cudaError_t PlanDecode(const DecodeShape& shape, const DecodeLengths& lengths, int window,
                       void* plan, cudaStream_t stream, const DecodeTuning& tuning) {
  DeviceLimits limits = tuning.limits;
  DecodeLaunch launch;
  cudaError_t error = CompleteLimits(&limits);
  if (error == cudaSuccess) error = LaunchOf(shape, tuning.form, limits, &launch);
  if (error != cudaSuccess || launch.cluster.taken()) return error;
  PlanArguments a;
  a.lengths = lengths;
  LayOutPlan(shape, launch, plan, &a.plan);
  a.batch = shape.batch;
  a.kv_heads = shape.kv_heads;
  a.q_tokens = shape.q_tokens;
  a.page_tokens = shape.tile.tokens;
  a.window = window;
  a.blocks = launch.blocks;
  a.groups_max = launch.groups_max();
  a.segments_max = SegmentsMax(shape, launch);
  a.clusters = {a.plan.clusters, 0, 0, 0};
  if (launch.cluster.by_plan) {
    a.clusters.blocks = launch.cluster.blocks();
    a.clusters.clusters = launch.blocks / a.clusters.blocks;
    a.clusters.overhead = kPlannedOverhead / launch.column_tiles;
  }
  a.batch_invariant = shape.batch_invariant;
  const size_t lines = (static_cast<size_t>(a.blocks) * a.groups_max + 1 +
                        2 * (static_cast<size_t>(shape.batch) + 1)) *
                       sizeof(int32_t);
  a.shared_lines = lines <= kPlanSharedMax;
  PlanKernel<<<1, kPlanThreads, a.shared_lines ? lines : 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
