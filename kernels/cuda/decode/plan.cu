// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/plan.h"

#include <algorithm>

#include "kernels/cuda/common/page_layout.cuh"
#include "kernels/cuda/decode/cluster_plan.cuh"
#include "kernels/cuda/decode/kernels.h"

namespace crumb::kernels::cuda {
namespace {

// Threads of the plan kernel's only block.
constexpr int kPlanThreads = 512;
// Shared memory that a kernel has without an attribute.
constexpr size_t kPlanSharedMax = 40 << 10;

// Fixed cost of a segment in addition to its bytes, in pages of one worker's time: rotating the
// query, summing over warps, merging. It is smaller in blocks of several workers, because the
// others continue meanwhile.
__device__ int Int2Overhead(int workers) { return workers == 1 ? 24 : workers == 2 ? 12 : 10; }
__device__ int Bf16Overhead(int workers) { return workers == 1 ? 16 : workers == 2 ? 8 : 7; }
// Time that the planned schedule spends outside its tile loop in excess of clusters, in pages of a
// block's time with up to 8 query rows (measured where both schedules took the same time;
// docs/kernels/decode.md). With more query rows a page takes longer, so it is divided by
// query_tiles.
constexpr int kPlannedOverhead = 195;
// Problems per block from which blocks are divided into several workers.
constexpr int kWorkerProblemsMin = 1;

// The cost of a sequence for one KV head. A page has about as many bytes as 8 BF16 tokens, so a
// page costs 1 and a chunk of 16 tokens costs 2.
struct SequenceCost {
  int first_page;
  int pages;   // pages that the sliding window leaves
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
  int workers_max;
  int segments_max;
  bool batch_invariant;
  bool shared_lines;
};

// Intermediate results of planning. The arrays lie in shared memory if they fit.
struct PlanState {
  int32_t* boundary;        // [workers + 1] position on the cost line where a work range begins
  int32_t* cost_before;     // [batch + 1] cost of earlier sequences, one head
  int32_t* segment_before;  // [batch + 1] segments, or items, of earlier sequences, one head
  int workers;              // per block
  int active;               // workers that have work
  int head_cost;
  int head_segments;
};

__device__ SequenceCost CostOf(const PlanArguments& a, int sequence, int workers) {
  const int sink = a.lengths.sink_tokens[sequence];
  const int pages = a.lengths.pages[sequence];
  const int recent = WindowTokens(a.lengths, sequence);
  SequenceCost cost;
  cost.int2_overhead = Int2Overhead(workers);
  cost.bf16_overhead = Bf16Overhead(workers);
  cost.first_page = 0;
  if (a.window > 0) {
    const int total = sink + pages * a.page_tokens + recent;
    const int oldest =
        total - a.q_tokens - a.window + 1;  // oldest token that the first query token sees
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

// Returns the last index i of `count` ascending values with value[i] <= x. REQUIRES: value[0] <= x.
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

// Returns exclusive sums over the block of two values per thread, and their totals.
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

// Returns where the work range of worker `index` begins: an equal fraction of the cost, moved down
// to a position where a cut is allowed.
__device__ int BoundaryOf(const PlanArguments& a, const PlanState& state, int index) {
  const int head_cost = state.head_cost;
  const int raw =
      static_cast<int>(static_cast<int64_t>(index) * a.kv_heads * head_cost / state.active);
  const int head = raw / head_cost, rest = raw % head_cost;
  const int sequence = LastNotAbove(state.cost_before, a.batch, rest);
  const SequenceCost cost = CostOf(a, sequence, state.workers);
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

// Returns the place of worker `index`'s work range in the plan.
__device__ WorkRange& WorkRangeOf(const PlanArguments& a, const PlanState& state, int index) {
  return a.plan.work_ranges[index / state.workers * a.workers_max + index % state.workers];
}

// Writes the segments of one item (history or windows): `count` pieces of [from, to) on the cost
// line. `first` is the index of its first segment.
__device__ void WriteSegments(const PlanArguments& a, const PlanState& state, Segment segment,
                              int overhead, int from, int to, int first, int count,
                              int first_worker) {
  const bool int2 = segment.kind == kSegmentInt2;
  const int unit_cost = int2 ? 1 : 2;
  const int first_unit = segment.begin;
  const auto unit_at = [&](int position) {
    return first_unit + max(0, position - from - overhead) / unit_cost;
  };
  for (int i = 0; i < count; ++i) {
    int begin = from, end = to;
    if (!a.batch_invariant) {
      begin = max(from, state.boundary[first_worker + i]);
      end = min(to, state.boundary[first_worker + i + 1]);
    } else if (int2) {
      begin = i == 0 ? from : from + overhead + i * kInvariantSplitPages;
      end = min(to, from + overhead + (i + 1) * kInvariantSplitPages);
    }
    segment.begin = unit_at(begin);
    segment.end = unit_at(end);
    a.plan.segments[first + i] = segment;
    const int worker =
        a.batch_invariant ? LastNotAbove(state.boundary, state.active, begin) : first_worker + i;
    if (begin == state.boundary[worker]) {
      WorkRangeOf(a, state, worker).first = segment;
      WorkRangeOf(a, state, worker).begin = first + i;
    }
    if (end == state.boundary[worker + 1]) WorkRangeOf(a, state, worker).end = first + i + 1;
  }
}

// Writes both items, history and windows, of one problem.
__device__ void WriteProblem(const PlanArguments& a, const PlanState& state, int head,
                             int sequence) {
  const SequenceCost cost = CostOf(a, sequence, state.workers);
  if (cost.cost() == 0) return;
  const int from = head * state.head_cost + state.cost_before[sequence];
  const int middle = from + cost.int2(), to = from + cost.cost();
  const int base = head * state.head_segments + state.segment_before[sequence];
  // A segment's index is the number of items before its own plus, where workers cut items, its
  // worker's index. It increases from segment to segment for any cuts.
  int first[2] = {base, base}, count[2] = {0, 0}, worker[2] = {0, 0};
  const int bounds[3] = {from, middle, to};
  for (int kind = 0; kind < 2; ++kind) {
    if (bounds[kind] == bounds[kind + 1]) continue;
    if (a.batch_invariant) {
      count[kind] =
          kind == kSegmentInt2 ? (cost.pages + kInvariantSplitPages - 1) / kInvariantSplitPages : 1;
      first[kind] = base + (kind == kSegmentInt2 ? 0 : count[0]);
    } else {
      worker[kind] = LastNotAbove(state.boundary, state.active, bounds[kind]);
      count[kind] =
          LastNotAbove(state.boundary, state.active, bounds[kind + 1] - 1) - worker[kind] + 1;
      first[kind] = base + (kind == kSegmentBf16 && cost.pages > 0) + worker[kind];
    }
  }
  Segment segment = {};
  segment.sequence = sequence;
  segment.head = head;
  segment.problem = head * a.batch + sequence;
  segment.int2_first = first[0];
  segment.int2_count = count[0];
  segment.bf16_first = first[1];
  segment.bf16_count = count[1];
  for (int kind = 0; kind < 2; ++kind) {
    segment.kind = kind;
    segment.begin = kind == kSegmentInt2 ? cost.first_page : 0;
    WriteSegments(a, state, segment, kind == kSegmentInt2 ? cost.int2_overhead : cost.bf16_overhead,
                  bounds[kind], bounds[kind + 1], first[kind], count[kind], worker[kind]);
  }
}

// Writes the segments of a block, which all its work ranges have in common.
__device__ void CompleteWorkRanges(const PlanArguments& a, const PlanState& state, int block) {
  WorkRange* work_ranges = a.plan.work_ranges + block * a.workers_max;
  int begin = 0, end = 0, head = 0;
  for (int g = 0; g < state.workers; ++g) {
    if (work_ranges[g].begin == work_ranges[g].end) continue;
    if (begin == end) begin = work_ranges[g].begin, head = work_ranges[g].first.head;
    end = work_ranges[g].end;
  }
  for (int g = 0; g < a.workers_max; ++g) {
    if (g >= state.workers) work_ranges[g] = work_ranges[0];
    work_ranges[g].block_begin = begin;
    work_ranges[g].block_end = end;
    work_ranges[g].block_head = head;
    work_ranges[g].workers = state.workers;
  }
}

// Plans clusters. Returns whether they are used; then there is nothing more to plan.
__device__ bool PlanForClusters(const PlanArguments& a) {
  __shared__ int32_t costs[kPlanThreads];
  if (a.clusters.work == nullptr) return false;
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
  if (PlanForClusters(a)) return;
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
    state.cost_before = state.boundary + a.blocks * a.workers_max + 1;
    state.segment_before = state.cost_before + a.batch + 1;
  }
  state.workers = 1;
  int2 mine, total, before;
  for (;;) {
    mine = make_int2(0, 0);
    for (int s = begin; s < end; ++s) {
      const SequenceCost cost = CostOf(a, s, state.workers);
      mine = make_int2(mine.x + cost.cost(), mine.y + SplitsOf(a, cost));
    }
    before = ScanBlock(mine, &total);
    const bool many = total.y * a.kv_heads >= 2 * kWorkerProblemsMin * a.blocks;
    if (state.workers == a.workers_max || a.batch_invariant || !many) break;
    state.workers = a.workers_max;  // costs depend on it and are counted again
    __syncthreads();
  }
  for (int s = begin; s < end; ++s) {
    const SequenceCost cost = CostOf(a, s, state.workers);
    state.cost_before[s] = before.x;
    state.segment_before[s] = before.y;
    before = make_int2(before.x + cost.cost(), before.y + SplitsOf(a, cost));
  }
  __syncthreads();

  const int all = total.x * a.kv_heads, workers = a.blocks * state.workers;
  state.head_cost = total.x;
  state.head_segments = total.y;
  state.active = max(1, min(workers, all / kUnitsPerBlockMin));
  for (int i = threadIdx.x; i <= workers; i += kPlanThreads) {
    state.boundary[i] = i < state.active && all > 0 ? BoundaryOf(a, state, i) : all;
    if (i < workers) WorkRangeOf(a, state, i).begin = WorkRangeOf(a, state, i).end = 0;
  }
  // Indices between the segments of two workers of a block may remain unused.
  for (int i = threadIdx.x; i < a.segments_max; i += kPlanThreads) {
    a.plan.segments[i].kind = kSegmentNone;
  }
  __syncthreads();
  for (int problem = threadIdx.x; problem < a.batch * a.kv_heads; problem += kPlanThreads) {
    WriteProblem(a, state, problem / a.batch, problem % a.batch);
  }
  __syncthreads();
  for (int block = threadIdx.x; block < a.blocks; block += kPlanThreads) {
    CompleteWorkRanges(a, state, block);
  }
}

// Sets `part` to the next `count` elements of a buffer, at a 256-byte boundary. Returns the offset
// behind them.
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
  launch->query_rows = LaunchQueryRowsFor(shape.tile, shape.query_rows());
  const int query_rows = launch->query_rows;
  launch->interleaved = query_rows <= 4 || (query_rows > 8 && query_rows <= 12);
  launch->query_tiles = query_rows <= 8 ? 1 : 2;
  launch->blocks = limits.processors;
  launch->slot_bytes = shape.tile.int2_bytes();
  launch->warps = WarpsFor(dim, launch->query_tiles);
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
  const int problems = shape.batch * shape.kv_heads;
  if (!shape.batch_invariant) return 2 * problems + launch.blocks * launch.workers_max();
  return problems * ((shape.max_pages + kInvariantSplitPages - 1) / kInvariantSplitPages + 1);
}

size_t LayOutPlan(const DecodeShape& shape, const DecodeLaunch& launch, void* base,
                  PlanView* view) {
  size_t at = 0;
  const size_t workers = static_cast<size_t>(launch.blocks) * launch.workers_max();
  at = Take(base, at, workers, &view->work_ranges);
  at = Take(base, at, workers + 1, &view->boundary);
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
    const size_t problems = static_cast<size_t>(shape.batch) * shape.kv_heads;
    const size_t parts = problems * launch.cluster.parts;
    *view = {};
    at = Take(base, at, problems * launch.cluster.blocks(), &view->arrivals);
    return Take(base, at, parts * rows * dim / 2, &view->packets);
  }
  view->packets = nullptr;
  // Each block of a cluster has its own counter.
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
  a.workers_max = launch.workers_max();
  a.segments_max = SegmentsMax(shape, launch);
  a.clusters = {a.plan.clusters, 0, 0, 0};
  if (launch.cluster.by_plan) {
    a.clusters.blocks = launch.cluster.blocks();
    a.clusters.clusters = launch.blocks / a.clusters.blocks;
    a.clusters.planned_overhead = kPlannedOverhead / launch.query_tiles;
  }
  a.batch_invariant = shape.batch_invariant;
  const size_t lines = (static_cast<size_t>(a.blocks) * a.workers_max + 1 +
                        2 * (static_cast<size_t>(shape.batch) + 1)) *
                       sizeof(int32_t);
  a.shared_lines = lines <= kPlanSharedMax;
  PlanKernel<<<1, kPlanThreads, a.shared_lines ? lines : 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace crumb::kernels::cuda
