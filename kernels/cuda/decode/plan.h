// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/cluster_layout.h"
#include "kernels/cuda/decode/decode_attention.h"

// The plan that PlanDecode writes to device memory, the workspace of DecodeAttention, and the
// launch configuration that both depend on. Internal to the CUDA back end.
namespace crumb::kernels::cuda {

inline constexpr int kChunkTokens = 16;  // BF16 rows that a warp attends at a time
// pages per split with DecodeShape::batch_invariant
inline constexpr int kInvariantSplitPages = 128;
// least cost of a worker's range, so that small batches use fewer workers
inline constexpr int kUnitsPerBlockMin = 16;
inline constexpr int kStagesMax = 4;    // bound on the tiles that each warp has in shared memory
inline constexpr int kPassRows = 16;    // query rows that are rotated, or inverse-rotated, together
inline constexpr int kWorkerWarps = 4;  // warps of a worker in blocks of several workers

enum SegmentKind : int32_t { kSegmentInt2 = 0, kSegmentBf16 = 1, kSegmentNone = 2 };

// Consecutive pages, or consecutive BF16 chunks, of one (sequence, KV head) that one worker
// processes without interruption. Its partial result has the segment's index.
struct alignas(16) Segment {
  int32_t sequence;
  int32_t head;
  int32_t begin;  // first page, or first chunk (sink chunks come before recent chunks)
  int32_t end;
  int32_t kind;
  int32_t problem;     // the (sequence, KV head): head * batch + sequence
  int32_t int2_first;  // the problem's segments, in split order
  int32_t int2_count;
  int32_t bf16_first;
  int32_t bf16_count;
  int32_t pad[2];
};
static_assert(sizeof(Segment) == 48);

// The work of one worker: segments [begin, end). The first segment is repeated here, so that a
// worker reads one line before it starts to load. A block is one worker of all its warps or, if
// there are many segments, several workers of kWorkerWarps each, whose ranges follow each other.
struct alignas(128) WorkRange {
  Segment first;
  int32_t begin;
  int32_t end;
  int32_t block_begin;  // segments of the whole block
  int32_t block_end;
  int32_t block_head;  // KV head of its first segment
  int32_t workers;     // workers of the block: 1 or DecodeLaunch::workers_max()
};
static_assert(sizeof(WorkRange) == 128);

// The work of one cluster, where the plan decides between both schedules (ClusterLaunch::by_plan).
struct alignas(16) ClusterWork {
  int32_t parts;  // clusters of its problem; 0: none; kNoClusters: its blocks have work ranges
  int32_t part;   // index among the problem's clusters, which follow each other
  int32_t sequence;
  int32_t head;
};
inline constexpr int kNoClusters = -1;

// Pointers to the arrays of the plan.
struct PlanView {
  WorkRange* work_ranges;  // [blocks, workers_max]; all alike in a block of one worker
  int32_t* boundary;  // [blocks * workers_max + 1] position on the cost line where a range begins
  int32_t* cost_before;     // [batch + 1] cost of earlier sequences, one head
  int32_t* segment_before;  // [batch + 1] segments, or items, of earlier sequences, one head
  Segment* segments;        // [SegmentsMax]
  ClusterWork* clusters;    // [blocks / blocks per cluster], or null
};

// Pointers to the arrays of the workspace. With clusters only `arrivals` [problems, blocks] and
// `packets` are not null; where the plan decides, all are.
struct WorkspaceView {
  int32_t* arrivals;     // [kv_heads * batch] segments done; zero between calls
  uint32_t* q_fragment;  // [segments, FragmentWords] bytes of q R_K
  float* row_constant;   // [segments, rows, 1 + groups] raw score to log2 units, sums of q'
  float* row_state;      // [segments, rows, 2] running max (log2 units) and softmax sum
  float* partial;        // [segments, rows, head_dim] sums of values relative to the running max
  // [clusters, blocks, rows, slice / 2] parts that a problem's clusters leave for the last one;
  // zero between calls
  uint64_t (*packets)[2];
};

// The launch configuration of the attention kernel on a device.
struct DecodeLaunch {
  int query_rows = 1;  // query rows per launch; a call with more has several launches
  int blocks = 0;
  int warps = 0;
  int stages = 0;  // tiles that each warp has in shared memory
  bool interleaved =
      false;            // whether the last query tile has 4 rows, each in two neighbouring columns
  int query_tiles = 1;  // tiles of 8 columns
  size_t slot_bytes = 0;
  size_t shared_bytes = 0;
  ClusterLaunch cluster;  // the cluster schedule, if it is used

  int rows() const { return 8 * query_tiles - (interleaved ? 4 : 0); }
  int workers_max() const { return warps / kWorkerWarps; }
  // Words of a segment's rotated query.
  size_t FragmentWords(const TileShape& tile) const {
    const int split = tile.group_size == 32 ? 2 : 1;
    return static_cast<size_t>(2 * query_tiles - (interleaved ? 1 : 0)) * tile.head_dim / 32 *
           split * 64;
  }
};

// Warps per block as far as shared memory allows: as many as registers permit.
constexpr int WarpsFor(int head_dim, int query_tiles) {
  return query_tiles * head_dim > 128 ? 8 : 12;
}

// Bounds on the query rows of a call and of a launch: output and query of more rows would not fit
// into registers.
inline constexpr int kQueryRowsMax = 64;
constexpr int LaunchQueryRowsFor(const TileShape& tile, int query_rows) {
  const int query_rows_max = tile.head_dim == 128 && tile.group_size == 128 ? 16 : 8;
  const int launches = (query_rows + query_rows_max - 1) / query_rows_max;
  return (query_rows + launches - 1) / launches;
}

// Computes the launch configuration within complete limits. Returns cudaErrorInvalidValue if the
// sizes are not supported.
cudaError_t LaunchOf(const DecodeShape& shape, DecodeForm form, const DeviceLimits& limits,
                     DecodeLaunch* launch);

int SegmentsMax(const DecodeShape& shape, const DecodeLaunch& launch);
// Set the view's pointers from `base`, which may be null, and return the bytes.
size_t LayOutPlan(const DecodeShape& shape, const DecodeLaunch& launch, void* base, PlanView* view);
size_t LayOutWorkspace(const DecodeShape& shape, const DecodeLaunch& launch, void* base,
                       WorkspaceView* view);

}  // namespace crumb::kernels::cuda
